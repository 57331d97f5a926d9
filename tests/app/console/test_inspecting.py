"""A look into a round in a real terminal, and without one: tokens, pictures, forced tokens, branches."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.command_line.arguments import own_values
from app.console.state import ConsoleState
from app.replay.player import replay
from app.screen.live import KEYS
from app.settings.table import Layers, ModelOptions, Settings
from tests.support.refusals import refused
from tests.support.screen import Terminal
from tests.support.scripted import catalogue_of, run_lines
from tests.support.tiny import tiny_pair
from utils.visible import visible

pytestmark = pytest.mark.slow

LOADED = 120.0


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspecting")
    return catalogue_of(folder, {"tiny": tiny_pair(folder / "tiny", stop=False)}, {"temperature": 0.7})


@pytest.fixture(scope="module", params=[60, 80, 100, 140])
def terminal(
    request: pytest.FixtureRequest, catalogue: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Terminal]:
    environ = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")), "SPEC_MAX_NEW_TOKENS": "12"}
    opened = Terminal("--models", str(catalogue), columns=request.param, rows=24, environ=environ, warm=True)
    opened.wait("›", 30)
    opened.enter("one", until=lambda: "TTFT" in opened.raw and opened.at_prompt, seconds=LOADED)
    yield opened
    opened.child.close(force=True)


def fits(terminal: Terminal) -> bool:
    """Whether no line wraps: the program draws each row within the screen."""
    return all(len(line) <= terminal.screen.columns for line in terminal.lines)


# ---------------------------------------------------------------- in a terminal, 24 rows, four widths


def test_a_picture_of_a_round_goes_on_by_n_and_p(terminal: Terminal) -> None:
    terminal.enter("/trace 1", until="n next round")
    assert "round 1" in terminal.text
    assert re.search(r"verify \d+\.\d", terminal.text)
    terminal.type("n", until="round 2")
    terminal.type("pp", until="prefill")
    assert fits(terminal)
    terminal.type("nq", until=lambda: terminal.at_prompt and "q leave" not in terminal.text)
    assert "round 1" in terminal.text


def test_a_walk_over_the_tokens_shows_what_else_was_considered(terminal: Terminal) -> None:
    terminal.type("\x1bOQ", until="token 1/12")  # F2
    terminal.type("\x1b[C\x1b[C", until="token 3/12")
    assert "rank" in terminal.text
    assert "said" in terminal.text
    terminal.type("\x1b[F", until="token 12/12")
    assert fits(terminal)
    terminal.type("q", until=lambda: terminal.at_prompt and "q leave" not in terminal.text)


def test_a_forced_token_makes_a_branch_and_undo_returns(terminal: Terminal) -> None:
    terminal.enter("/inspect 4", until="token 4/12")
    terminal.type("\x1b[B\x1b[B\x1b[A" if "› " in terminal.text else "")
    terminal.type("\x1b[A" * 9)  # to the first alternative, and if that was said to the next one
    terminal.quiet(0.2)
    first = next(line for line in terminal.lines if re.search(r"› +\"", line))
    terminal.type(
        "\x1b[B\r" if "said" in first else "\r",
        until=lambda: "branch 2 of 2" in terminal.text and terminal.at_prompt,
        seconds=30,
    )
    terminal.enter("/branches", until="at token 4")
    assert "*2" in terminal.text
    terminal.enter("/undo", until="as it was before a token was forced")
    terminal.enter("/branches", until="*1")


def test_a_race_in_steps_stops_after_each_phase_until_a_key(terminal: Terminal) -> None:
    terminal.enter("/slow step", until="slow = step")
    terminal.enter("two")
    for phase in ("1 draft", "2 one pass", "3 accept", "4 commit", "1 draft"):
        terminal.wait(lambda phase=phase: phase in terminal.text and KEYS[:20] in terminal.text)  # type: ignore[misc]
        assert fits(terminal)
        assert "TTFT" in terminal.text  # the lanes stay in view
        terminal.type(" ")
    terminal.wait("2 one pass")
    terminal.type("r", until="1 draft")  # the next round
    terminal.type("q", until=lambda: terminal.at_prompt and KEYS[:20] not in terminal.text)  # to the end
    terminal.enter("/slow 1", until="slow = 1")


# ---------------------------------------------------------------- without one


def test_heat_off_shows_the_answer_as_it_was_printed(catalogue: Path) -> None:
    texts: list[str] = []

    def note(state: ConsoleState) -> None:
        texts.append(state.said().turns[-1].text)

    ran = run_lines(catalogue, "one", note, "/heat entropy", "/heat off")
    assert not ran.errors
    assert ran.text.rstrip().endswith(visible(texts[0]).rstrip())


def test_without_a_terminal_inspect_lists_all_tokens_or_tells_of_one(catalogue: Path) -> None:
    ran = run_lines(catalogue, "/inspect", "one", "/inspect", "/inspect 2", "/inspect 99", "/trace 1", "/trace 99")
    assert ran.errors[0] == "error: no answer yet"
    rows = ran.after("/inspect").splitlines()
    assert [row.split()[0] for row in rows[1:13]] == [str(number) for number in range(1, 13)]
    assert all(re.search(r"accepted \(drafter\)|correction|bonus|own token", row) for row in rows[1:13])
    assert ran.after("/inspect 2").startswith("token 2/12  round 1")
    assert ran.after("/trace 1").startswith("round 1")
    assert "error: there is no token 99: the answer has 12" in ran.errors
    assert any(line.startswith("error: there is no round 99: the answer has rounds 0 to") for line in ran.errors)


def test_the_answer_is_the_same_whether_looked_into_or_not(catalogue: Path) -> None:
    texts: list[tuple[int, ...]] = []

    def look(state: ConsoleState) -> None:
        texts.append(state.said().turns[-1].answer)

    run_lines(catalogue, "one", look, "/regen", "/inspect", "/trace", look)
    run_lines(catalogue, "one", "/inspect", look, "/regen", look)
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]


def test_a_forced_token_cuts_the_answer_and_a_saved_branch_can_be_inspected(catalogue: Path, tmp_path: Path) -> None:
    from app.console.chat_commands import force
    from app.screen.inspection import Force

    answers: list[tuple[int, ...]] = []

    def other(state: ConsoleState) -> None:
        said = state.latest.tokens[4] if state.latest else None
        assert said is not None
        token = next(choice.token for choice in said.choices if choice.fate != "said" and choice.token > 2)
        answers.append(state.said().turns[-1].answer)
        force(state, Force(4, token))
        answers.append(state.said().turns[-1].answer)
        assert answers[-1][:5] == (*answers[0][:4], token)
        forced = next(choice.text for choice in said.choices if choice.token == token)
        for track in state.latest.tracks if state.latest else ():
            first, *later = track.pane_as(state.settings).spans
            assert (first.text, first.kind) == (forced, "forced")
            assert "".join(span.text for span in (first, *later) if span.committed) == forced + track.text

    def look(state: ConsoleState) -> None:
        answers.append(state.said().turns[-1].answer)

    ran = run_lines(
        catalogue, "one", "/branches", other, "/inspect 5", "/branches", "/branches 1", look, "/branches 2", look,
        f"/save {tmp_path}/chat.json", "/undo", look, "/branches 3", "/branches 2", "two", "/branches",
    )  # fmt: skip
    assert "forced: neither target nor drafter was asked" in ran.after("/inspect 5")
    assert ran.after("/inspect 5").startswith("token 5/17")
    assert "*2  from 1 at token 5: " in ran.text
    first, branch, *later = answers
    assert later == [first, branch, first]
    assert ran.errors == [
        "error: the last answer has no branches: /inspect, then Enter on another token, makes one",
        "error: there is no branch 3: the last answer has 2",
        "error: the last answer has no branches: /inspect, then Enter on another token, makes one",
    ]
    loaded = run_lines(catalogue, f"/load {tmp_path}/chat.json", "/inspect", "/stats")
    assert loaded.errors == []
    assert len(loaded.after("/inspect").splitlines()) >= 13


def test_a_continued_answer_is_inspected_from_its_first_token(catalogue: Path) -> None:
    assert "  24 " in run_lines(catalogue, "one", "/continue", "/inspect").after("/inspect")


def test_what_a_file_saved_says_the_same_when_it_is_loaded(catalogue: Path, tmp_path: Path) -> None:
    ran = run_lines(catalogue, "/set log_top=5", "one", "/inspect", "/inspect 3", f"/save {tmp_path}/chat.json")
    loaded = run_lines(catalogue, f"/load {tmp_path}/chat.json", "/inspect", "/inspect 3")
    assert [loaded.after(line) for line in ("/inspect", "/inspect 3")] == [
        ran.after(line) for line in ("/inspect", "/inspect 3")
    ]
    assert "positions" in json.dumps(json.loads((tmp_path / "chat.json").read_text())["turns"][0]["decodings"])


# ---------------------------------------------------------------- from a log


def test_a_log_that_keeps_alternatives_is_inspected_without_a_model(
    catalogue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = Layers(flags={"max_new_tokens": 12})
    lines = (
        f"/set record={tmp_path}/a.jsonl log_top=5",
        "one",
        "/inspect",
        "/reset record",
        f"/set record={tmp_path}/b.jsonl log_top=0",
        "one",
        "/exit",
    )
    ran = run_lines(catalogue, *lines, layers=layers)
    settings = Settings(color="never")
    first, second = (
        own_values("replay", {"file": tmp_path / name, "inspect": True}, ()) for name in ("a.jsonl", "b.jsonl")
    )
    assert replay(settings, ModelOptions(), first) == 0
    assert capsys.readouterr().out.split() == ran.after("/inspect").split()
    refused(replay, settings, ModelOptions(), second, match="--log-top 5 keeps them")
