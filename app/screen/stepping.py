"""A race in steps: in every round of one lane it stops after drafting, the target's pass, accepting and committing.

The race has run before, so that no pause is on a clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from app.lanes.race import timed
from app.screen.live import Draw, Track, look_of, rounds_of
from app.screen.palette import Look
from app.screen.rows import Row, chunk, flow, plural
from app.screen.terminal import await_key
from app.screen.trace import ACCEPTED, DRAFTED, SCORED
from app.screen.view import Surface
from sampling.events import Event, Step

KEYS = "any key: next phase  r: next round  q: run on"
_FRAME = 10  # rows that are left to the panes and figures


Pause = tuple[float, str]  # seconds at a phase, and the key that ended it


def stepped(
    race: Iterable[tuple[int, Event]],
    tracks: Sequence[Track],
    place: Surface,
    draw: Draw,
    *,
    taken: list[Pause],
    known: Sequence[Pause] = (),
) -> Iterator[tuple[int, Event]]:
    """The events of a race, which is run first, each once its phases were seen.

    Pauses are added to `taken`. The first ones end as the `known` do unless a key is pressed sooner.
    """

    def key() -> bytes:
        seconds, pressed = known[len(taken)] if len(taken) < len(known) else (math.inf, "")
        begun = time.monotonic()
        typed = await_key(place.stop, seconds)
        typed = typed if typed or place.stop() else pressed.encode("latin-1")
        taken.append((round(time.monotonic() - begun, 2), typed.decode("latin-1")))
        return typed

    return Stepper(tracks, draw, lambda: look_of(place.out, place.settings), key)(race)


class Stepper:
    """Shows a race to its end, phase by phase in the rounds of the last lane that drafts.

    `draw` shows the lanes as they stand with rows below them, within `look()`; `key` waits for one, b"" ends the steps.
    """

    def __init__(self, tracks: Sequence[Track], draw: Draw, look: Callable[[], Look], key: Callable[[], bytes]) -> None:
        self.tracks, self.draw, self.look, self.key = tracks, draw, look, key
        drafting = [index for index, track in enumerate(tracks) if getattr(track.lane, "drafts", False)]
        self.lane = drafting[-1] if drafting else None
        self.stepping = self.lane is not None

    def __call__(self, race: Iterable[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
        """The events of a race that has run, each once its phases were seen."""
        run = list(race)
        for _, lane, event in timed(run):
            stops = lane == self.lane and isinstance(event, Step) and bool(event.drafted)
            skipped = not stops or not self._phases(event)  # type: ignore[arg-type]
            yield lane, event
            if not skipped:
                assert isinstance(event, Step)
                text_of_phase = f"4 commit: {plural(len(event.emitted), 'token')} joined the text"
                self._stop([*flow([chunk(text_of_phase, "strong")], self.look())])

    def _phases(self, step: Step) -> bool:
        """Stop after drafting, scoring and accepting; return False if a key skips the rest of the round."""
        calls = ", ".join(f"{call.model} {call.passes}" for call in step.calls[:-1])
        ran = f", passes: {calls}" if calls else ""
        own = "no token from the target" if step.token is None else "and the target's own token"
        text_of_phase = (
            f"1 draft: {plural(len(step.drafted), 'token')} in {step.draft_s * 1000:.1f} ms{ran}",
            f"2 one pass of the target over {len(step.drafted) + 1} positions in {step.verify_s * 1000:.1f} ms",
            f"3 accept: {len(step.path)} of {len(step.drafted)}, {own}",
        )
        return all(
            self._picture(step, text, phase)
            for text, phase in zip(text_of_phase, (DRAFTED, SCORED, ACCEPTED), strict=True)
        )

    def _picture(self, step: Step, text_of_phase: str, phase: int) -> bool:
        """Stop at a phase of the round that comes next."""
        track = self.tracks[self.lane or 0]
        rows = rounds_of(track, self.look().sized(), upcoming=[step]).so_far(phase)
        return self._stop([*flow([chunk(text_of_phase, "strong")], self.look()), *rows])

    def _stop(self, rows: list[Row]) -> bool:
        if not self.stepping:
            return False
        look = self.look()
        room = max(1, (look.height or len(rows) + _FRAME + 1) - _FRAME)
        self.draw([*rows[: room - 1], *flow([chunk(KEYS, "faint")], look)[:1]])
        pressed = self.key()
        self.stepping = pressed not in (b"", b"q")
        return self.stepping and pressed != b"r"
