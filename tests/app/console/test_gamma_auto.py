"""`gamma auto` from the command line to the screen: setting, lanes, console, benchmark. Tiny real models."""

import re
from pathlib import Path
from typing import Any

from app.lanes.lane import PairEngine
from app.screen.view import toolbar
from app.settings.table import Settings
from sampling.events import Step
from sampling.gamma.controller import Controller
from tests.app.lanes.test_lanes import ids_of
from tests.support.scripted import run_lines

AUTO: dict[str, Any] = {"gamma": "auto", "max_new_tokens": 40, "quiet": True}


def test_the_toolbar_shows_the_gamma_of_the_last_round() -> None:
    assert "gamma auto  " in toolbar("p", Settings(gamma="auto"), "", 0, 0)
    assert "gamma auto(2.5)  " in toolbar("p", Settings(gamma="auto"), "", 0, 0, 2.5)
    assert "gamma 4  " in toolbar("p", Settings(), "", 0, 0, 3)


def test_a_pace_outlives_the_conversation_and_its_drafter(engine: PairEngine) -> None:
    settings = Settings(**AUTO)
    engine.forget()
    assert engine.mean_drafted(settings) is None
    first = engine.lane("spec", settings).pace
    ids_of(engine, "spec", settings)
    assert first is not None
    assert first.costs.references > 0, "it has learned from plain rounds"
    assert engine.lane("spec", settings.changed(temperature=0.5)).pace is first
    assert engine.mean_drafted(settings) == first.mean_drafted
    assert engine.lane("spec", Settings(gamma=4)).pace is None
    assert engine.lane("ar", settings).pace is None
    ngram = engine.lane("ngram", settings).pace
    assert engine.lane("ngram", settings.changed(ngram_n=5)).pace is not ngram
    drafter = engine.lane("spec", settings).drafter
    engine.forget()
    again = engine.lane("spec", settings)
    assert isinstance(again.pace, Controller)
    assert again.pace is first  # how long passes take, and what drafts of this pair are worth, is no conversation's
    assert again.drafter is not drafter


def test_the_console_tells_what_auto_does(catalogue: Path) -> None:
    seen: list[list[int]] = []

    def note(state: Any) -> None:
        seen.append([event.gamma for event in state.answers[-1].tracks[-1].events if isinstance(event, Step)])
        assert state.answers[-1].settings.gamma == "auto"

    ran = run_lines(catalogue, "/gamma auto", "one", note, "/trace", "/gamma 0", "/gamma 3")
    assert ran.after("/gamma auto").startswith("gamma = auto\n")
    for number, gamma in list(enumerate(seen[0]))[1:]:
        assert re.search(rf"round {number}\s+(γ|gamma) {gamma}\b", ran.text), (number, gamma)
    assert "error: gamma must be a whole number from 1 to 64 or auto, got 0 (still auto)" in ran.text
    assert ran.state.settings.gamma == 3
