"""/why: every number of the paragraph is the log's, by a computation of its own, and the advice fits the session."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from app.lanes.costs import LaneRecord, Terms
from app.replay.session_log import read_log
from app.screen.live import Track, tokens_of
from app.screen.why import CODE, FIRST, KINDS, NAMES, NUMBERS, OTHER, Why, kinds_of
from app.settings.table import Settings
from sampling.events import Call, Finished, Likely, Position, Prefill, Reason, Step, to_json
from tests.support.scripted import run_lines
from utils.remote.pieces import ServerFigures

ROOT = Path(__file__).resolve().parents[3]
LOGS = [ROOT / "docs" / "examples" / name for name in ("win-and-loss.jsonl", "class.jsonl", "session.jsonl")]
LOGS.append(ROOT / "app" / "replay" / "demo.jsonl")
PLAIN_MS = 10.0  # of a token
TEXT = (
    "The old bridge in Harrow has 12 arches. It is stone.\nCall `add(2)` or:\n```\ndef add(a): return a\n```\n"
    "I think Mr. Hill's dog ran. 3 men saw it: Anna did.\n"
)
PIECES = re.findall(r" ?\w+| ?[^\w\s]+|\s", TEXT)
KIND = {"The": FIRST, " It": FIRST, "Call": FIRST, " Harrow": NAMES, " Mr": NAMES, " Hill": FIRST, " Anna": FIRST}


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[token % len(PIECES)] for token in ids)


# -- sessions that are made up -------------------------------------------------------------------------


class Made(NamedTuple):
    """A session: `rounds` are (drafted, accepted) of each; costs in milliseconds; `slope` of a pass, in plain ones.

    `likeliest`: the rejected drafts are the target's likeliest token. `by`: the source of each round's drafts.
    """

    rounds: Sequence[tuple[int, int]]
    draft_ms: float = 0.0  # of a token
    slope: float = 0.0
    gamma: int | str | None = 4
    names: tuple[str, ...] = ("drafter",)
    by: Sequence[int] = ()
    temperature: float = 0.0
    likeliest: bool = False
    lanes: tuple[str, ...] = ("ar", "spec")
    reason: Reason = "eos"
    plain_ms: float = PLAIN_MS
    seen: bool = False


def steps_of(made: Made) -> Iterator[Step]:
    token = 0
    for number, (drafted, accepted) in enumerate([(0, 0), *made.rounds]):
        ids = range(token, token + drafted)
        said = [*ids[:accepted], token + accepted]
        source = made.by[number - 1] if made.by and number else 0
        draft_ms, name = made.draft_ms * drafted, made.names[source] if made.names else ""
        calls = [Call(name, drafted, draft_ms / 2000)] if drafted and source == len(made.names) - 1 else []
        positions = []
        for index, each in enumerate(said):
            other = token + 1000 if index == accepted < drafted else -1
            rank = 2 if other >= 0 and made.likeliest else 1
            likely = [Likely(each, 0.4, 0.4, rank, 0.0)]
            likely += [Likely(other, 0.5, 0.5, 3 - rank, 0.0)] if other >= 0 else []
            positions.append(Position(tuple(likely), (), 1.0))
        yield Step(
            row=0,
            gamma=made.gamma if isinstance(made.gamma, int) else drafted,
            drafted=tuple([*ids[:accepted], token + 1000, *ids[accepted + 1 :]][:drafted]),
            parents=tuple(range(-1, drafted - 1)),
            source=(source,) * drafted,
            path=tuple(range(accepted)),
            token=said[-1],
            target_p=(0.5,) * min(drafted, accepted + 1),
            draft_p=(0.5,) * min(drafted, accepted + 1),
            top2_gap=1.0,
            calls=(*calls, Call("target", 1, 0.001)),
            draft_s=draft_ms / 1000,
            verify_s=(PLAIN_MS - 1) * (1 + made.slope * drafted) / 1000,
            sample_s=0.0006,
            overhead_s=0.0004,
            positions=tuple(positions),
        )
        token += len(said)


def track_of(name: str, steps: Sequence[Step], made: Made, report: ServerFigures | None = None) -> Track:
    drafts = name not in ("ar", "server")
    settings = Settings(temperature=made.temperature, compare=made.lanes)
    terms = Terms(
        drafts=drafts, gamma=made.gamma if drafts else None, sources=made.names if drafts else (), seen=made.seen
    )
    track = Track(LaneRecord(name, terms, settings=settings), decode, 5)
    for event in (Prefill(5, 5, 0.02), *steps, Finished(0, made.reason, report)):
        track.feed(event)
    return track


def tracks_of(made: Made) -> list[Track]:
    own = list(steps_of(made))
    plain = list(steps_of(Made([(0, 0)] * (sum(len(step.emitted) for step in own) - 1))))
    slowed = [step.verify_s + (made.plain_ms - PLAIN_MS) / 1000 * (at % 2) for at, step in enumerate(plain)]
    plain = [Step(**{**to_fields(step), "verify_s": took}) for step, took in zip(plain, slowed, strict=True)]
    return [track_of(name, {"ar": plain, "spec": own}[name], made) for name in made.lanes]


def to_fields(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in Step.__slots__}


MANY = [(4, 4), (4, 2), (4, 0), (4, 3)] * 6
CASES = {
    "drafting too dear": (Made(MANY, draft_ms=25.0), "/compare ar,spec,tables: drafting is too dear"),
    "drafts too long": (Made([(8, 1), (8, 2), (8, 0)] * 6, draft_ms=1.0, gamma=8), "/gamma 2: about 1.67x"),
    "pass too dear": (Made(MANY, slope=1.1), "/compare ar (no drafts): a pass over several tokens"),
    "never accepted": (
        Made([(4, 0)] * 20, slope=0.1),
        "/compare ar (no drafts): even if drafting cost nothing, too few drafts are accepted.",
    ),
    "a model that never pays": (
        Made([(4, 4), (3, 0)] * 10, 3.0, 0.05, "auto", ("match", "tables", "feature"), [1, 2] * 10),
        "/compare ar,spec,tables: about 1.92x without",
    ),
    "look-ups that never pay": (
        Made([(4, 0), (3, 3)] * 10, 1.0, 0.1, "auto", ("match", "tables", "feature"), [0, 2] * 10),
        "/compare ar,spec,feature: about ",
    ),
    "nearly always right": (Made([(2, 2)] * 15 + [(2, 1)], 0.2, 0.02, 2), "/gamma 4: about 4.10x"),
    "short": (Made([(4, 2)] * 3, 1.0, reason="length"), "/length 128: 3 rounds are too few to judge by."),
    "long drafts, few rounds": (Made([(16, 16)] * 5, 0.1, gamma=16, reason="length"), "/length 344: 5 rounds are"),
    "short and whole": (Made([(4, 2)] * 3, 1.0), "a question with a longer answer: 3 rounds are too few"),
    "temperature high": (
        Made([(4, 1), (4, 0)] * 8, 0.5, 0.02, temperature=1.2, likeliest=True),
        "/temperature 0: about 3.95x",
    ),
    "plain lane absent": (Made(MANY, 1.0, lanes=("spec",)), "/compare ar,spec: beside plain"),
    "plain alone": (Made(MANY, lanes=("ar",)), "/compare ar,spec: nothing was drafted here."),
    "disturbed": (Made(MANY, 0.1, plain_ms=100.0), "another question: the timing was disturbed."),
    "nothing drafted": (Made([(0, 0)] * 20), "a text that repeats itself: nothing could be looked up."),
    "seen before": (Made([(4, 4)] * 20, gamma="auto", names=("suffix",), seen=True), "another question: these drafts"),
    "auto, and a loss": (Made([(2, 0), (2, 1)] * 10, 2.0, 0.2, "auto"), "/compare ar (no drafts): drafting is too"),
    "as it should be": (
        Made([(4, 4), (4, 3)] * 8, 0.1, 0.02, "auto"),
        "Nothing is expected to bring 5% more; /trace 2 shows the round that lost most drafts (1).",
    ),
    "the right gamma": (
        Made([(1, 1), (1, 0)] * 12, 2.0, 0.3, 1),
        "No other gamma is expected to bring 5% more; keep /gamma 1.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_advice_fits_the_session(case: str) -> None:
    made, advice = CASES[case]
    text = str(Why(tracks_of(made), lambda word: word == "tables"))
    assert re.split(r"\. (?:Try )?(?=[^.]*(?:\d\.\d[^.]*)*\.$)", text)[-1].startswith(advice), text
    assert text.count(" Try ") == (advice[0] not in "N")
    assert text.endswith(".")


def test_a_server_says_what_it_reports_and_no_more() -> None:
    made = Made([(0, 0)] * 9)
    pieces = [Step(**{**to_fields(step), "top2_gap": None, "positions": ()}) for step in steps_of(made)]
    told = str(Why([track_of("server", pieces, made, ServerFigures(tokens=20, drafted=12, accepted=9, passes=4))]))
    assert told.startswith("Server: 20 tok, ") or told.startswith("Server")
    assert "by the server: accepted 9/12 (75%), 3.25 tok/pass over 4 passes" in told
    assert "Try python infer.py check TARGET DRAFTER --for vllm" in told
    assert "ms" not in told


# -- every number, from the log alone ------------------------------------------------------------------


def logged(log: Path) -> Iterator[tuple[Any, dict[int, list[Any]]]]:
    """For each answer of a log its row and the raw steps of its lanes."""
    for line in log.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "answer":
            steps: dict[int, list[Any]] = {}
            answer = row
        if row["kind"] == "event" and row["event"] == "step":
            steps.setdefault(row["lane"], []).append(row)
        if row["kind"] == "answered":
            yield answer, steps


def spent(steps: Sequence[Any], *parts: str) -> float:
    return 1000 * sum(step[f"{part}_s"] for step in steps for part in parts)


EVERY = ("draft", "verify", "sample", "overhead")


def said(step: Any) -> int:
    return len(step["path"]) + (step["token"] is not None)


def depth(step: Any, node: int) -> int:
    return 0 if step["parents"][node] < 0 else 1 + depth(step, step["parents"][node])


def refused(step: Any) -> bool:
    last = step["path"][-1] if step["path"] else -1
    return step["token"] is not None and last in step["parents"]


def deepest(step: Any) -> int:
    return max((depth(step, node) + 1 for node in range(len(step["parents"]))), default=0)


def sentences(steps: Sequence[Any], plain: Sequence[Any], names: Sequence[str], gamma: Any) -> Iterator[str]:
    """What the paragraph must hold, in its words, of the rounds after the opening ones."""
    own, one = steps[1:], plain[1:]
    whole, tokens = spent(own, *EVERY), sum(map(said, own))
    token_ms = spent(one, *EVERY) / sum(map(said, one))
    yield f"{sum(map(said, steps))} tok, {whole / 1000:.2f} s after the first ("
    gained = token_ms * tokens / whole
    if abs(gained - 1) > 0.02:
        yield f"({max(gained, 1 / gained):.2f}x {'faster' if gained > 1 else 'slower'} than plain decoding)."
    else:
        yield "(as fast as plain decoding)."
    shares = (f"{100 * spent(own, *parts) / whole:.0f}%" for parts in (["verify"], ["draft"], ["sample", "overhead"]))
    yield "Passes took {} of the time, drafts {}, the rest {};".format(*shares)
    rounds = len(own) * token_ms
    parts = (whole, spent(own, "verify"), spent(own, "draft"), spent(own, "sample", "overhead"))
    yield f"a round brought {tokens / len(own):.2f} tokens and took as long as {parts[0] / rounds:.2f}"
    yield "plain ones ({:.2f} for its pass, {:.2f} for drafts, {:.2f} for the rest).".format(
        *(part / rounds for part in parts[1:])
    )
    drafted, accepted = sum(len(step["drafted"]) for step in own), sum(len(step["path"]) for step in own)
    yield f"{accepted} of {drafted} drafts were accepted"
    calls = {name: 1000 * sum(call[2] for step in own for call in step["calls"] if call[0] == name) for name in names}
    extra = max(0, whole - rounds - sum(calls.values()))
    listed = []
    for index, name in enumerate(names):
        mine = sum(step["source"].count(index) for step in own)
        kept = sum(step["source"][node] == index for step in own for node in step["path"])
        saved = kept * token_ms - calls[name] - extra * mine / drafted
        listed += (
            [f"{name} {kept} of {mine} ({'lost' if saved < -0.5 else 'saved'} {abs(saved):.0f} ms)"] if mine else []
        )
    if len(listed) > 1:
        yield f"accepted: {', '.join(listed)}."
    places = [[0, 0], [0, 0], [0, 0]]
    for step in own:
        for place in range(len(step["path"]) + refused(step)):
            places[min(place, 2)][1] += 1
            places[min(place, 2)][0] += place == len(step["path"])
    if any(rejected for rejected, _ in places):
        words = zip(places, ("first drafts", "second ones", "later ones"), strict=True)
        yield "Rejected: " + ", ".join(f"{lost} of {seen} {name}" for (lost, seen), name in words if seen)
    free = token_ms * tokens / (whole - spent(own, "draft"))
    right = token_ms * sum(deepest(step) + 1 for step in own) / whole
    gammas = "at this gamma" if isinstance(gamma, int) else "at these gammas"
    yield f"If drafting took no time: {free:.2f}x; if every draft were accepted, {gammas}: {right:.2f}x."


@pytest.mark.parametrize("case", [name for name, (made, _) in CASES.items() if made.lanes == ("ar", "spec")])
def test_every_number_of_a_made_up_session_is_that_of_its_events(case: str) -> None:
    made, _ = CASES[case]
    tracks = tracks_of(made)
    plain, own = ([to_json(step) for step in track.steps] for track in tracks)
    told = str(Why(tracks))
    if case in ("disturbed", "nothing drafted", "seen before"):
        return
    assert [sentence for sentence in sentences(own, plain, made.names, made.gamma) if sentence not in told] == []
    cut = re.search(r"By gamma: (.+); best ([\d.]+)x at (\d+)( \(beyond (\d+): estimated\))?", told)
    assert cut is not None
    measured = max(drafted for drafted, _ in made.rounds)
    assert cut[5] == (str(measured) if int(cut[3]) > measured else None)
    assert cut[1].count(" (now)") == isinstance(made.gamma, int)
    assert f"x at {made.gamma} (now)" in cut[1] or made.gamma == "auto"
    assert max(float(rate) for rate in re.findall(r"([\d.]+)x", cut[1])) <= float(cut[2])
    for rate, gamma in re.findall(r"([\d.]+)x at (\d+)", cut[1]):
        assert float(rate) == pytest.approx(forecast(made, int(gamma)), abs=0.006)


def test_gammas_that_bring_nearly_as_much_as_the_best_are_named() -> None:
    text = str(Why(tracks_of(Made([(2, 2), (2, 1), (2, 0), (2, 0)] * 6, draft_ms=0.5, slope=0.17, gamma=2))))
    assert re.search(r"; best ([\d.]+)x at 1, 2 about the same\.", text), text


def forecast(made: Made, gamma: int) -> float:
    """The speed-up of the rounds at another gamma, where a pass costs 1 + slope · drafts plain ones."""
    drafted, accepted = sum(n for n, _ in made.rounds), sum(kept for _, kept in made.rounds)
    alpha, tokens, spent = accepted / sum(kept + (kept < n) for n, kept in made.rounds), 0.0, 0.0
    for n, kept in made.rounds:
        length = gamma if n == (made.gamma if isinstance(made.gamma, int) else n) else min(n, gamma)
        more = sum(alpha**k for k in range(1, gamma - n + 1)) if n == kept and length > n else 0.0
        tokens += 1 + min(kept, gamma) + more
        spent += 1 + made.draft_ms * length + (PLAIN_MS - 1) * (1 + made.slope * length)
    assert drafted
    return tokens * PLAIN_MS / spent


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_every_number_of_a_logged_answer_is_that_of_the_log(log: Path) -> None:
    checked = 0
    for answer, (row, raw) in zip(read_log(log).answers, logged(log), strict=True):
        tracks = answer.over()
        names = [lane["name"] for lane in row["lanes"]]
        told = Why(tracks)
        if "ar" in names and told.lane.name != "ar" and told.token_ms:
            at = names.index(told.lane.name)
            assert [
                sentence
                for sentence in sentences(raw[at], raw[names.index("ar")], row["lanes"][at]["source_names"], told.gamma)
                if sentence not in str(told)
            ] == []
            checked += sum(map(said, raw[at]))
            longest = max(len(step.drafted) for step in tracks[at].steps)
            if not any(0 < step.gamma <= step.length for step in told.rounds):  # nothing goes on beyond it
                assert told.at(longest) == pytest.approx(told.speedup)
    assert checked > 30


# -- kinds of tokens -----------------------------------------------------------------------------------


def in_code(text: str) -> list[bool]:
    """Of each character whether it stands between backticks: three on any lines, one on its line."""
    places = list[bool]()
    for number, part in enumerate(text.split("```")):
        for line in part.splitlines(keepends=True):
            for at, piece in enumerate(line.split("`")):
                places += [number % 2 == 1 or at % 2 == 1] * (len(piece) + (at < line.count("`")))
        places += [number % 2 == 1] * 3
    return places


def by_hand(texts: Sequence[str]) -> list[str]:
    """The kinds of these tokens, from a list of the text's words."""
    text, code, kinds, start = "".join(texts), in_code("".join(texts)), list[str](), 0
    places = {at: match for match in re.finditer(r"[\w'’-]+", text) for at in range(match.start(), match.end())}
    for token in texts:
        at = start + len(token) - len(token.lstrip())
        word = places.get(at)
        kind = OTHER
        if re.search(r"\d", token):
            kind = NUMBERS
        elif word and word[0][0].isupper() and word[0] not in ("I", "I'm", "I'd", "I've", "I'll"):
            ended = re.search(r"(^|[.!?:…\n])[ \t*_#>\-\"'“‘(\[`]*$", text[: word.start()])
            kind = NAMES if not ended else FIRST if word.start() >= start else OTHER
        kinds.append(CODE if code[at : at + 1] == [True] else kind)
        start += len(token)
    return kinds


def test_kinds_are_those_that_a_reader_sees() -> None:
    tokens = tokens_of(track_of("spec", list(steps_of(Made([(0, 0)] * (len(PIECES) - 1)))), Made([])))
    told = dict(zip(PIECES, kinds_of(tokens), strict=True))
    seen = {" 12": NUMBERS, " 3": NUMBERS, " arches": OTHER, " dog": OTHER, "def": CODE, " return": CODE, "add": CODE}
    for piece, kind in {**KIND, **seen, "I": OTHER, " men": OTHER}.items():
        assert told[piece] == kind, piece


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_kinds_of_rejected_tokens_are_counted_as_the_log_has_them(log: Path) -> None:
    for answer, (row, raw) in zip(read_log(log).answers, logged(log), strict=True):
        told = Why(answer.over())
        steps = raw[[lane["name"] for lane in row["lanes"]].index(told.lane.name)]
        kinds = by_hand([token.text for token in told.tokens])
        counts, at = {kind: [0, 0] for kind in KINDS}, 0
        for step in steps:
            for place in range(said(step)):
                accepted, rejected = place < len(step["path"]), place == len(step["path"]) and refused(step)
                counts[kinds[at]][0] += rejected
                counts[kinds[at]][1] += accepted or rejected
                at += 1
        if any(rejected for rejected, _ in counts.values()):
            words = ", ".join(f"{lost} of {seen} {kind}" for kind, (lost, seen) in counts.items() if seen)
            several = sum(seen > 0 for _, seen in counts.values()) > 1
            assert (f"; by kind of token {words}." in str(told)) == several
            assert ("by kind of token" in str(told)) == several


def test_temperature_0_is_judged_by_the_recorded_ranks() -> None:
    log, checked = LOGS[0], 0
    for answer, (row, raw) in zip(read_log(log).answers, logged(log), strict=True):
        told, ranks = Why(answer.over()), list[int]()
        for step in raw[[lane["name"] for lane in row["lanes"]].index(told.lane.name)][1:]:
            nodes = [*step["path"], *([len(step["path"])] if refused(step) else [])]  # of a chain
            for place, node in enumerate(nodes):
                (rank,) = (likely[3] for likely in step["positions"][place][0] if likely[0] == step["drafted"][node])
                ranks.append(rank)
        line = f"At temperature 0, {ranks.count(1)} of these {len(ranks)} examined drafts would be accepted."
        assert (line in str(told)) == (row["settings"]["temperature"] > 0)
        checked += line in str(told)
    assert checked


# -- the command ---------------------------------------------------------------------------------------


def test_the_command_explains_the_last_answer_also_of_a_loaded_chat(catalogue: Path, tmp_path: Path) -> None:
    files = (f"/save {tmp_path}/chat.json", f"/load {tmp_path}/chat.json", "/why")
    ran = run_lines(catalogue, "/why", "one", "/why", *files, settings={"max_new_tokens": 30, "gamma": 3}, width=2000)
    assert ran.state.latest is not None
    assert ran.errors == ["error: no answer yet"]
    told = [part for part in ran.text.splitlines() if part.startswith("Speculative: 30 tok, ")]
    assert len(told) == 2
    assert told[0].partition(" Try ")[0] == told[1].partition(" Try ")[0]
    assert max(map(len, str(Why(ran.state.latest.tracks)).split())) < 60  # no word that a narrow screen cuts
