"""The page to hand round: whole without scripts, inert, and what it says of tokens and rounds is what the log says."""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from app.chat.page import PageAnswer, page
from app.command_line.main import main
from app.replay.session_log import read_log
from app.screen.inspection import LADDERS, Supposed
from app.screen.live import tokens_of
from app.screen.palette import Look
from sampling.events import Filters
from tests.support.chromium import Browser, needs_chromium
from tests.support.scripted import catalogue_of, run_lines
from tests.support.tiny import TinyPair

CLASS = Path(__file__).resolve().parents[3] / "docs" / "examples" / "class.jsonl"
HOSTILE = "</script><script>document.title='alive'</script> {{data}} <img src=x onerror=y> \x1b[31m \u202e"


@pytest.fixture(scope="module")
def sampled(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of two answers with drawn drafts, coins and alternatives; the second one has a tree."""
    folder = tmp_path_factory.mktemp("sampled")
    settings = {"temperature": 0.9, "compare": "ar,spec", "gamma": 4, "log_top": 20, "max_new_tokens": 60}
    settings["record"] = str(folder / "log.jsonl")
    lines = (HOSTILE, "/set coupling=gumbel seed=7", "two")
    assert not run_lines(catalogue_of(folder, {"tiny": pair}), *lines, settings=settings).errors
    return folder / "log.jsonl"


def page_of(log: Path, file: Path) -> tuple[str, Any]:
    """The page of a log and the JSON in it."""
    assert main(["replay", str(log), "--page", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    return text, json.loads(text.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])


def logged(log: Path) -> Iterator[tuple[int, int, list[Any]]]:
    """For each answer and lane the raw steps of a log."""
    rows, answer = [json.loads(line) for line in log.read_text().splitlines()], -1
    steps: dict[tuple[int, int], list[Any]] = {}
    for row in rows:
        answer += row["kind"] == "answer"
        if row["kind"] == "event" and row["event"] == "step":
            steps.setdefault((answer, row["lane"]), []).append(row)
    for (number, lane), found in steps.items():
        yield number, lane, found


def told(number: float) -> str:
    """A share as the page writes it."""
    digits = 2 if number >= 0.1 else 3 if number >= 0.01 else 4
    small = f"{number:.0e}".replace("e-0", "e-")
    return small if 0 < number < 1e-4 else f"{number:.{digits}f}".removeprefix("0")


def is_arithmetic(line: str, chance: float, number: float) -> bool:
    """Whether a coin, a chance and the quotient after it hold, of the log and of what is shown."""
    quotient = r" = (?:min\(1, )?p (\S+) / q ([^,)]+)\)?, both after .*"
    match = re.fullmatch(rf".*?coin (\S+) (<|>=) chance (\S+?)({quotient}| \(.* not kept\)): \w+", line)
    if not match:
        return False
    coin, bound = float(match[1]), float(match[3])
    right = coin == pytest.approx(number, rel=0.1, abs=0.006) and bound == pytest.approx(chance, rel=0.1, abs=0.006)
    right = right and (coin < bound if match[2] == "<" else coin >= bound)
    value = min(1.0, float(match[5]) / float(match[6])) if match[5] else bound
    return right and told(value) == told(bound)


# -- what is said of a token, against the log alone ----------------------------------------------------


def facts(step: Any, index: int) -> dict[str, Any]:
    """What the log has on the token `index` of a step: its node, the drafts examined in its place, their trials."""
    above = step["path"][index - 1] if index else -1
    examined = [node for node, parent in enumerate(step["parents"]) if parent == above]
    node = step["path"][index] if index < len(step["path"]) else None
    trials = {trial[0]: trial[1:3] for trial in step.get("trials", [])}
    position = step["positions"][index] if step.get("positions") else None
    return {"node": node, "rejected": [] if node is not None else examined, "trials": trials, "position": position}


def greedy(line: str, known: dict[str, Any], token: int) -> bool:
    return token == max(known["position"][0], key=lambda each: each[1])[0]


def race(line: str, known: dict[str, Any], token: int) -> bool:
    scores = sorted((math.log(each[2]) + each[4], each[0]) for each in known["position"][0] if each[2] and each[4])
    shown = [float(text) for text in re.findall(r'" (-?\d+\.\d\d)', line)]
    return scores[-1][1] == token and shown == [round(score, 2) for score, _ in scores[::-1][:2]]


def accepted(line: str, known: dict[str, Any], token: int) -> bool:
    chance, number = known["trials"][known["node"]]
    return number < chance and line.endswith(": accepted") and is_arithmetic(line, chance, number)


def rejected(line: str, known: dict[str, Any], token: int) -> bool:
    coins = [known["trials"][node] for node in known["rejected"]]
    return any(number >= chance and line.endswith(": rejected") and is_arithmetic(line, chance, number)
               for chance, number in coins if number is not None)  # fmt: skip


SENTENCES: dict[str, Callable[[str, dict[str, Any], int], bool]] = {
    r"coin \S+ < chance .*: accepted": accepted,
    r'".*": coin \S+ >= chance .*: rejected': rejected,
    r'".*" (was|were) drafted, the target chose ".*": rejected': lambda _, known, __: bool(known["rejected"]),
    r"the token was then drawn from what p has more than q": lambda _, known, __: bool(known["rejected"]),
    r"greedy: the target's likeliest token(, as drafted)?": greedy,
    r"drawn: largest log p \+ random noise: .*": race,
    r"every draft of its path was accepted: .* with the same pass": lambda _, known, __: not known["rejected"],
}  # fmt: skip


def wrong(said: list[str], step: Any, index: int, token: int) -> list[str]:
    """The sentences on a token that the log does not bear out."""
    known, bad = facts(step, index), []
    for line in said:
        if match := re.fullmatch(
            r"(\d+) (further drafts? discarded, not examined|drafts? on other branches left aside)", line
        ):
            right = int(match[1]) == len(step["drafted"]) - len({*step["path"], *known["rejected"]})
        else:
            check = next((check for form, check in SENTENCES.items() if re.fullmatch(form, line)), None)
            right = check is not None and check(line, known, token)
        bad += [] if right else [line]
    return bad


@pytest.mark.parametrize("which", ["class", "sampled"])
def test_a_hundred_tokens_by_lot_say_what_the_log_says(which: str, sampled: Path, tmp_path: Path) -> None:
    log = CLASS if which == "class" else sampled
    _, data = page_of(log, tmp_path / "page.html")
    cases = []
    for answer, lane, steps in logged(log):
        emitted = [(step, at, number) for number, step in enumerate(steps) for at in range(_emitted(step))]
        tokens = data["answers"][answer]["lanes"][lane]["tokens"]
        assert len(emitted) == len(tokens)
        cases += [(step, at, number, token) for (step, at, number), token in zip(emitted, tokens, strict=True)]
    cases = [case for case in cases if case[0].get("positions")]
    seen = ""
    for step, index, number, token in random.Random(68).sample(cases, 100):
        ids = [step["drafted"][node] for node in step["path"]] + [step["token"]]
        assert (token["round"], token["token"]) == (number, ids[index])
        assert wrong(token["said"], step, index, ids[index]) == []
        seen += "".join(token["said"])
        for choice in token["choices"]:
            row = dict(zip(data["columns"]["choices"], choice, strict=False))
            for likely in step["positions"][index][0]:
                if likely[0] == row["token"]:
                    assert (row["p"], row["rank"]) == pytest.approx((likely[1], likely[3]), rel=1e-3)
                    listed = row["rank"] <= 5 or row.get("fate")
                    assert row["processed"] == (pytest.approx(likely[2], rel=1e-3) if listed else None)
            for proposal in step["positions"][index][1]:
                if proposal[0] == row["token"]:
                    assert row["q"] == pytest.approx(proposal[1], rel=1e-3)
    assert [
        words
        for words in (
            ("greedy", "rejected")
            if which == "class"
            else ("coin", "more than q", "drawn: largest log p", "both after the settings")
        )
        if words not in seen
    ] == []


def _emitted(step: Any) -> int:
    return len(step["path"]) + (step["token"] is not None)


@pytest.mark.parametrize("which", ["class", "sampled"])
def test_rounds_have_the_logs_drafts_times_and_figures(which: str, sampled: Path, tmp_path: Path) -> None:
    log = CLASS if which == "class" else sampled
    text, data = page_of(log, tmp_path / "page.html")
    for answer, lane, steps in logged(log):
        known = data["answers"][answer]["lanes"][lane]
        assert len(known["rounds"]) == len(steps)
        for shown, step in zip(known["rounds"], steps, strict=True):
            times = [step[f"{name}_s"] * 1000 for name in ("draft", "verify", "sample", "overhead")]
            assert shown["ms"] == pytest.approx(times, abs=1e-4)
            drafts = {row[0]: dict(zip_longest(data["columns"]["drafts"], row)) for row in shown["drafts"]}
            assert [drafts[node]["parent"] for node in range(len(drafts))] == step["parents"]
            for node, draft in drafts.items():
                fate = "accepted" if node in step["path"] else draft["fate"]
                last = step["path"][-1] if step["path"] else -1
                assert draft["fate"] == fate
                assert (fate == "rejected") == (step["token"] is not None and draft["parent"] == last)
                if step.get("odds"):
                    assert (draft["p"], draft["q"]) == pytest.approx(step["odds"][node], rel=1e-3, abs=1e-6)
            for node, chance, number, p, q in (trial for trial in step.get("trials", []) if len(trial) > 4):
                if number is not None and p is not None:  # what R shows is what the coin's chance is made of
                    shown_p, shown_q = drafts[node]["p_processed"], drafts[node]["q_processed"]
                    assert (shown_p, shown_q) == pytest.approx((p, q), rel=1e-3)
                    assert min(1, shown_p / shown_q) == pytest.approx(chance, rel=2e-3)
            if step["drafted"]:
                drafted, scored, judged, committed = shown["says"]
                assert f"{len(step['drafted'])} token" in drafted
                assert f"{times[0]:.1f} ms" in drafted
                assert f"over {len(step['drafted']) + 1} positions in {times[1]:.1f} ms" in scored
                assert f"{len(step['path'])} of {len(step['drafted'])}" in judged
                assert f"{_emitted(step)} token" in committed
        drafted = sum(len(step["drafted"]) for step in steps)
        kept = sum(len(step["path"]) for step in steps)
        if drafted:
            assert f"accepted {kept}/{drafted} ({kept / drafted:.0%})" in text
            assert f"tok/pass over {len(steps) - 1} passes" in text


def test_the_page_of_the_examples_is_that_of_its_log(tmp_path: Path) -> None:
    """`python infer.py replay docs/examples/win-and-loss.jsonl --page docs/examples/win-and-loss.html` renews it."""
    log = CLASS.with_name("win-and-loss.jsonl")
    page_of(log, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == log.with_suffix(".html").read_bytes()


# -- a page by itself ---------------------------------------------------------------------------------


def test_it_is_read_without_scripts_and_loads_nothing(tmp_path: Path) -> None:
    text, data = page_of(CLASS, tmp_path / "page.html")
    body = re.sub("<del.*?</del>|<[^>]*>", "", text.partition("<main>")[2].partition("</main>")[0])
    body = body.replace("&#x27;", "'").replace("&quot;", '"').replace("&lt;", "<")
    for answer in data["answers"]:
        assert answer["question"] in body
        assert answer["text"] in body
    assert [
        words
        for words in ("autoregressive", "speculative", "tok/s", "accepted, by tables", "identical by construction")
        if words not in body
    ] == []
    assert re.findall(r"https?:|url\(|@import|src=|href=|\beval|innerHTML", text) == []
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-\S{44}'", text)


def test_answers_are_numbered_and_only_sources_that_accepted_are_in_the_legend(tmp_path: Path) -> None:
    text, data = page_of(CLASS.with_name("win-and-loss.jsonl"), tmp_path / "page.html")
    assert all(
        f">{number} · {answer['question'][:9]}" in text for number, answer in enumerate(data["answers"], start=1)
    )
    legends = re.findall(r'<p class="faint legend">(.*?)</p>', text)
    lanes = [lane for answer in data["answers"] for lane in answer["lanes"]]
    for legend, lane in zip(legends, lanes, strict=True):
        kept = {lane["sources"][row[5]] for each in lane["rounds"] for row in each["drafts"] if row[6] == "accepted"}
        assert set(re.findall("accepted, by ([^<]*)", legend)) == kept
    glossary = re.sub("<[^>]*>", "", text.partition("<dl>")[2].partition("</dl>")[0])
    assert [
        word
        for word in (
            "tables",
            "match",
            "an earlier answer",
            "the target held likely after the same tokens earlier in this answer",
            "only a lossy one does not",
            "the same logits, bit for bit",
            "feature",
            "plain",
            "said",
            "cut",
            "entropy",
            "discarded",
            "prefill",
        )
        if word not in glossary
    ] == []
    assert [word for word in ("&gamma;", "TTFT", "identical by construction") if word not in glossary] == []
    assert [
        words
        for words in ("min(1, p/q), both after the settings", "Why (commands are for the console): ")
        if words not in text
    ] == []
    assert "those after the settings, which were compared, were not kept" in lanes[5]["figures"][0]


def test_no_text_of_a_model_or_user_is_markup(sampled: Path, tmp_path: Path) -> None:
    text, data = page_of(sampled, tmp_path / "page.html")
    assert data["answers"][0]["question"].startswith("</script><script>document.title='alive'</script> {{data}} <img")
    assert text.count("<script") == text.count("</script") == 2
    assert "<img" not in text
    assert not {"\x1b", "\u202e"} & set(text)
    assert "{{body}}" in page([PageAnswer("\ud800 \ufffe {{body}}", "</script> <!-- \u2028")]).encode().decode()


def test_two_hundred_tokens_are_less_than_400_kb(pair: TinyPair, tmp_path: Path) -> None:
    settings = {"temperature": 0.9, "compare": "ar,spec", "gamma": 4, "max_new_tokens": 200}
    assert not run_lines(
        catalogue_of(tmp_path, {"tiny": pair}), "one", f"/save {tmp_path}/chat.html", settings=settings
    ).errors
    text = (tmp_path / "chat.html").read_text(encoding="utf-8")
    assert text.count("data-t=") == 400
    assert '"rank"' in text
    assert len(text.encode()) < 400_000


def test_a_beam_search_is_its_text_and_another_lane_is_played(pair: TinyPair, tmp_path: Path) -> None:
    settings = {"compare": "ar,spec,beam", "record": str(tmp_path / "log.jsonl")}
    assert not run_lines(catalogue_of(tmp_path, {"tiny": pair}), "one", settings=settings).errors
    text, data = page_of(tmp_path / "log.jsonl", tmp_path / "page.html")
    (answer,) = data["answers"]
    assert (answer["telling"], answer["lanes"][2]["rounds"]) == (1, [])
    assert text.count(answer["text"].split("\ufffd")[0]) >= 1


def test_only_answers_without_other_processors_can_be_tried_otherwise(pair: TinyPair, tmp_path: Path) -> None:
    settings = {"record": str(tmp_path / "log.jsonl")}
    lines = "one", "/set typical_p=0.9", "two"
    assert not run_lines(catalogue_of(tmp_path, {"tiny": pair}), *lines, settings=settings).errors
    _, data = page_of(tmp_path / "log.jsonl", tmp_path / "page.html")
    assert [bool(answer["fixed"]["argmax"]) for answer in data["answers"]] == [False, True]


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(CLASS.read_bytes())
    for file in (str(log), str(tmp_path / "no" / "page.html"), str(tmp_path)):
        assert main(["replay", str(log), "--page", file]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert log.read_bytes() == CLASS.read_bytes()


# -- in a browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


CONTRAST = """(() => {
  const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const back = node => { for (; node; node = node.parentElement) { const color = getComputedStyle(node).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color; } return "rgb(255, 255, 255)"; };
  let least = 99;
  for (const node of document.querySelectorAll("body *")) {
    const said = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!node.checkVisibility() || !said) continue;
    const [one, other] = [light(getComputedStyle(node).color), light(back(node))].sort((a, b) => b - a);
    least = Math.min(least, (one + .05) / (other + .05));
  }
  return least;
})()"""


@needs_chromium
@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_played_and_clicked(width: int, dark: bool, browser: Browser, tmp_path: Path) -> None:
    _, data = page_of(CLASS, tmp_path / "page.html")
    browser.resize(width, dark=dark)
    browser.open(tmp_path / "page.html")
    assert browser.run("document.documentElement.scrollWidth") <= width
    lane = data["answers"][1]["lanes"][1]
    browser.click("article:nth-of-type(2) .lane:nth-of-type(2) [data-t]", 6)
    card = browser.run("document.querySelectorAll('.card')[1].innerText")
    assert all(line in card for line in lane["tokens"][6]["said"])
    assert f"Token 7 of {len(lane['tokens'])}" in card
    browser.press("ArrowRight")
    assert "Token 8 of" in browser.run("document.querySelectorAll('.card')[1].innerText")
    browser.run("document.activeElement.blur()")
    browser.press("Home")
    tokens = "document.querySelectorAll('article')[1].querySelectorAll('.lane:last-child [data-t]')"
    shown = f"[...{tokens}].filter(node => !node.hidden).length"
    said, where = [], "document.querySelectorAll('[role=status]')[1].textContent"
    for at, round in enumerate(lane["rounds"]):
        for phase, text in enumerate(round["says"]):
            assert f"round {at} of {len(lane['rounds']) - 1}" in browser.run(where)
            said.append(browser.run("document.querySelectorAll('.round')[1].innerText"))
            assert text in said[-1]
            before = sum(each["round"] < at for each in lane["tokens"])
            accepted = sum(each["round"] == at and each["kind"] == "accepted" for each in lane["tokens"])
            own = sum(each["round"] == at and each["kind"] != "accepted" for each in lane["tokens"])
            last = phase == len(round["says"]) - 1
            assert browser.run(shown) == before + accepted * (phase == 2 or last) + own * last
            browser.press("ArrowRight")
    assert browser.run(shown) == len(lane["tokens"])
    browser.press(" ", " ")
    assert browser.run("answers[1].play.textContent") == "Pause"
    browser.press(" ", " ")
    assert browser.run(CONTRAST) >= 4.5
    assert browser.run("document.title") != "alive"
    assert browser.errors == []


@needs_chromium
@pytest.mark.exhaustive
def test_the_round_follows_the_token_and_shows_what_was_compared(
    browser: Browser, sampled: Path, tmp_path: Path
) -> None:
    _, data = page_of(sampled, tmp_path / "page.html")
    browser.resize(1280)
    browser.open(tmp_path / "page.html")
    lane, seen = data["answers"][0]["lanes"][1], set()
    first = "document.querySelector('article')"
    for number, token in enumerate(lane["tokens"]):
        browser.run(f"{first}.querySelectorAll('.lane:last-child [data-t]')[{number}].click()")
        picture = browser.run(f"{first}.querySelector('.round').innerText")
        where = browser.run(f"{first}.querySelector('[role=status]').textContent")
        rounds, at = lane["rounds"], token["round"]
        assert picture.startswith(f"Round {at}, speculative" if at else "Prefill, speculative")
        own = next((each["kind"] for each in lane["tokens"] if each["round"] == at and each["kind"] != "accepted"), "")
        assert (
            where
            == f"round {at} of {len(rounds) - 1}, {own if rounds[at]['drafts'] else 'no draft' if at else 'prefill'}"
        )
        assert browser.run(f"{first}.querySelectorAll('.lane:last-child [data-t][hidden]').length") == 0
        assert "q(x), p(x) after the settings" in picture
        seen.add(own)
        for row in rounds[at]["drafts"]:
            draft = dict(zip_longest(data["columns"]["drafts"], row))
            figures = f"q {told(draft['q_processed'] or draft['q'])}  p "
            assert (f"({figures}" in picture) if draft["fate"] == "discarded" else (figures in picture)
    assert seen >= {"correction", "bonus"}
    browser.run(f"{first}.querySelector('del').click()")
    chosen = "[aria-pressed=true]"
    assert browser.run(f"{first}.querySelector('del').nextElementSibling === {first}.querySelector('{chosen}')")
    assert browser.run(f"{first}.querySelector('.card thead').innerText").split() == [
        *("token", "p", "set", "rank", "q", "set", "rank")
    ]
    assert "-: not kept, not zero" in browser.run(f"{first}.querySelector('caption').innerText")
    assert browser.errors == []


@needs_chromium
@pytest.mark.exhaustive
def test_a_what_if_says_what_inspect_says(browser: Browser, sampled: Path, tmp_path: Path) -> None:
    page_of(sampled, tmp_path / "page.html")
    browser.resize(1280)
    browser.open(tmp_path / "page.html")
    tokens = [(at, answer.over()[1]) for at, answer in enumerate(read_log(sampled).answers)]
    cases = [(at, number, token, track) for at, track in tokens for number, token in enumerate(tokens_of(track))]
    lot, said = random.Random(68), ""
    for at, number, token, track in lot.sample(cases, 100):
        given = track.lane.settings
        shape = Filters(*(lot.choice(LADDERS[name]) for name in ("temperature", "top_k", "top_p", "min_p")))
        if shape == (given.temperature, given.top_k, given.top_p, given.min_p):
            continue
        nodes = f"document.querySelectorAll('article')[{at}].querySelectorAll('.lane:last-child [data-t]')"
        browser.run(f"{nodes}[{number}].click()")
        for name, value in zip(("temperature", "top-k", "top-p", "min-p"), shape, strict=True):
            steps = f"[...new Set([...LADDERS['{name.replace('-', '_')}'], {getattr(given, name.replace('-', '_'))}])]"
            browser.run(
                f"(slider => {{ slider.value = {steps}.sort((a, b) => a - b).indexOf({value});"
                "slider.dispatchEvent(new Event('input')); })"
                f"(document.querySelectorAll('.card')[{at}].querySelector('[aria-label={name}]'))"
            )
        card = browser.run(f"document.querySelectorAll('.card')[{at}].querySelector('.if').innerText").split("\n")
        lines = Supposed(token, shape, given).lines(Look(10_000, color=False))
        assert card == lines
        said += "".join(lines)
    assert [
        words
        for words in ("the sum of min(p, q)", "rejected", "accepted", "it is not the likeliest")
        if words not in said
    ] == []
    assert browser.errors == []


@needs_chromium
@pytest.mark.exhaustive
def test_a_script_in_an_answer_does_not_run(browser: Browser, sampled: Path, tmp_path: Path) -> None:
    page_of(sampled, tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert browser.run("document.title") == "log.jsonl"
    assert browser.run("answers.length") == 2
    assert browser.errors == []
    browser.open(tmp_path / "page.html", scripts=False)
    assert browser.errors == []
