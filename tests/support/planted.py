"""Races of real lanes whose rounds take planted times, so that every figure on a screen can be worked out by hand."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from app.lanes.race import Race
from sampling.events import Event, Prefill, Step

Seconds = Callable[[int, str, Step], float]  # of the pass of a round: by answer, from 1, lane and round


def plant(monkeypatch: pytest.MonkeyPatch, where: str, seconds: Seconds) -> None:
    """Let the races that the module `where` starts take these times: only target passes take any."""
    count = [0]

    class Planted(Race):
        def __iter__(self) -> Iterator[tuple[int, Event]]:
            count[0] += 1
            for index, event in super().__iter__():
                yield index, self.timed(self.lanes[index].name, event)

        def timed(self, name: str, event: Event) -> Event:
            if isinstance(event, Prefill):
                return replace(event, seconds=0.0)
            if not isinstance(event, Step):
                return event
            return replace(event, draft_s=0.0, sample_s=0.0, overhead_s=0.0, verify_s=seconds(count[0], name, event))

    monkeypatch.setattr(f"{where}.Race", Planted)
