"""From a typed line to the target's first pass: how many of the project's functions are under way, in how many files.

A newcomer who follows a message has that many calls to read. Counted on the stack when the target is first asked to
score something for the answer, that call included, from the function on that holds the typed line. Test code counts
for nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sampling.models.causal import CausalSession
from tests.support.scripted import catalogue_of, run_lines
from tests.support.tiny import tiny_pair

ROOT = Path(__file__).resolve().parents[3]
MOST_FRAMES, MOST_FILES = 8, 6


def way() -> list[tuple[str, str]]:
    """File and function of every frame of the project on the stack, outermost first, from the console's loop on."""
    found, frame = [], sys._getframe(1)
    step: FrameType | None = frame
    while step is not None:
        file = Path(step.f_code.co_filename)
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests"):
            found.append((str(file.relative_to(ROOT)), step.f_code.co_qualname))
        step = step.f_back
    names = [name for _, name in reversed(found)]
    return found[::-1][names.index("loop") :]


@pytest.mark.parametrize("live", [False, True], ids=["plain", "terminal"])
def test_the_way_of_a_message_is_short(live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[str, str]]] = []
    score, waiting = CausalSession.score, [False]

    def counted(self: CausalSession, *given: Any, **named: Any) -> Any:
        if waiting[0]:
            waiting[0] = False
            seen.append([*way(), ("sampling/models/causal.py", "CausalSession.score")])
        return score(self, *given, **named)

    def begin(state: Any) -> None:
        state.engine()  # loading warms it up
        state.live, waiting[0] = live, True

    monkeypatch.setattr(CausalSession, "score", counted)
    catalogue = catalogue_of(tmp_path, {"tiny": tiny_pair(tmp_path / "tiny", stop=False)})
    ran = run_lines(catalogue, begin, "hello", "hello again")
    assert len(ran.state.chat.turns) == 2
    (frames,) = seen
    for file, name in frames:
        sys.stdout.write(f"{file}: {name}\n")
    assert frames[0] == ("app/console/repl.py", "loop")
    assert len(frames) <= MOST_FRAMES
    assert len({file for file, _ in frames}) <= MOST_FILES
