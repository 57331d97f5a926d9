"""Figures as a person meets them in the console: speed-ups of lanes, of a session, of answers seen before."""

import re
from pathlib import Path

import pytest

from app.chat.saved import answered_of
from app.lanes.answers import compared
from app.replay.session_log import read_log
from sampling.events import Step
from tests.support.planted import plant
from tests.support.scripted import Ran, run_lines

SHAPE = {"context": 4096}

CONSOLE = "app.console.answer"
LONG = {"max_new_tokens": 40, "gamma": 8, "temperature": 1.0}  # a random model loops when it is greedy
DISTURBED = "timing disturbed: faster than {:.2f} tok/pass allows"


def even(answer: int, lane: str, step: Step) -> float:
    """Every pass takes a second, so that a speed-up is the tokens of a pass."""
    return 1.0


def per_pass(ran: Ran, answer: int, lane: str) -> float:
    """Tokens a pass of a lane of an answer, from 1."""
    (track,) = (track for track in ran.state.answers[answer - 1].tracks if track.lane.name == lane)
    tokens = track.meter.stats.tokens_per_pass
    assert tokens is not None
    return tokens


# -- a session ----------------------------------------------------------------------------------


def test_a_session_compares_the_answers_that_both_lanes_gave(catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is three times as slow while the target answers alone: that is no speed-up of anybody."""
    plant(monkeypatch, CONSOLE, lambda answer, lane, step: 3.0 if answer == 1 else 1.0)
    ran = run_lines(catalogue, "/compare ar", "one", "/compare ar,ngram", "two", "/stats session", settings=LONG)
    told = ran.after("/stats session")
    assert "2 answers" in told
    assert f"ngram: {per_pass(ran, 2, 'ngram'):.2f}x the rate of plain decoding over 1 answer of both" in told


def test_drafters_are_kept_apart(catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, CONSOLE, even)
    ran = run_lines(catalogue, "one", "/drafter ngram", "one", "/stats session", settings={**LONG, "temperature": 0})
    first, second = re.split("target ← n-gram drafter\n", ran.after("/stats session"))
    assert first.startswith("target ← drafter\n")
    assert all(
        f"spec: {per_pass(ran, number, 'spec'):.2f}x the rate of plain decoding over 1 answer of both" in told
        for number, told in enumerate((first, second), start=1)
    )


# -- disturbed timings --------------------------------------------------------------------------


def test_a_speed_up_beyond_the_tokens_of_a_pass_is_said_to_be_disturbed(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few passes of plain decoding take long; the shortest show that wide passes are not shorter than narrow ones."""
    rounds = {"ar": 0, "ngram": 0}

    def spikes(answer: int, lane: str, step: Step) -> float:
        rounds[lane] += 1
        return 50.0 if lane == "ar" and rounds[lane] % 3 == 0 else 1.0

    plant(monkeypatch, CONSOLE, spikes)
    lines = ("one", "/stats", "/plot gamma", "/stats session")
    ran = run_lines(catalogue, *lines, width=200, settings={"max_new_tokens": 40, "compare": "ar,ngram"})
    words = DISTURBED.format(per_pass(ran, 1, "ngram"))
    assert all(f"\n{words}, same output" in ran.after(line) for line in ("one", "/stats"))
    figures = compared(ran.state.answers[-1].answers)
    assert (figures["speedup"], figures["disturbed"]) == (None, True)
    assert "timing of the last answer disturbed" in ran.after("/plot gamma")
    assert "ngram: no speed-up (1 answer with disturbed timing left out)" in ran.after("/stats session")
    assert not re.search(r"[\d.]+x (faster|the rate)", ran.text)


# -- seen before --------------------------------------------------------------------------------


def test_an_answer_that_the_session_has_seen_says_so(catalogue: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = ("/drafter suffix", "what was it", "/clear", "what was it", "/stats session", "something else")
    ran = run_lines(catalogue, *lines, settings={**LONG, "record": str(log)})
    shown = [any(track.pane().seen for track in answered.tracks) for answered in ran.state.answers]
    assert shown == [False, True, False]
    assert ran.text.count("seen before") == 2
    assert "2 answers, 1 of them seen before" in ran.after("/stats session")
    assert "tok/pass 5 passes seen before" in " ".join(ran.after("what was it").split())
    assert [answer.over()[-1].pane().seen for answer in read_log(log).answers] == shown, "a replay says the same"
    (saved,) = answered_of(ran.state.said().turns[0], lambda ids: "x" * len(ids))
    assert saved.tracks[-1].pane().seen, "and so does a saved chat"


@pytest.mark.parametrize("drafter", ["suffix", "tables"])
def test_earlier_answers_can_be_left_out_of_drafts(catalogue: Path, drafter: str) -> None:
    lines = (f"/drafter {drafter}", "/set suffix=off", "what was it", "/clear", "what was it", "/clear all")
    ran = run_lines(catalogue, *lines, settings=LONG)
    assert per_pass(ran, 1, "spec") == per_pass(ran, 2, "spec")
    assert "seen before" not in ran.text
    assert "answers are still remembered for drafts (/clear all forgets them)" in ran.after("/clear")
    assert ran.after("/clear all").strip() == "conversation cleared, and every answer before it"


# -- a real terminal ----------------------------------------------------------------------------
