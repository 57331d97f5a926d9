"""Several lanes answer one prompt, taking turns in one process: the lane with the least time on its clock is next.

Each lane's clock counts only its own compute, so the lanes advance at their true relative speed although one process
runs them all. The target reads the prompt once, and its time is put on the clock of every lane that runs on the target.
Time that the consumer of the events takes is on no clock. By the same clocks a finished race can be shown at any speed.
Knows no text and no screen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sampling.events import Event, Finished
from utils.processes import broadcast
from utils.remote.server import ServerMessage

if TYPE_CHECKING:
    from app.lanes.lane import Lane, PairEngine
    from sampling.types import Session

_NAP = 0.05  # longest sleep, in seconds, between two looks whether the user stopped the display


def seconds(event: Event) -> float:
    """Return the seconds of compute that an event adds to its lane's clock."""
    return 0.0 if isinstance(event, Finished) else event.seconds


class Race:
    """Iterates over (lane index, event). Each lane ends with its `Finished`, an interrupt included.

    `previous`: a session whose cache the race takes over; the caller must not use it again. `begun`: the beginning of
    the answer, where an encoder reads the prompt. `alternatives`: see :meth:`Lane.run`, for the last lane and those
    that draft. `messages`: the chat, which servers read. A server's lane runs to its end once it has begun: a server
    cannot pause, and one on this machine would disturb the others' clocks. After the end (or after closing the
    iterator) `session` is that of the last lane that shares the target (`previous` if none does), for the next turn;
    after an error it is None.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        engine: PairEngine,
        prompt: list[int],
        previous: Session | None = None,
        interrupt: Callable[[], bool] = lambda: False,
        begun: Sequence[int] = (),
        alternatives: int = 0,
        messages: Sequence[ServerMessage] = (),
    ) -> None:
        self.lanes, self.engine, self.prompt = lanes, engine, prompt
        self.interrupt, self.begun = interrupt, tuple(begun)
        self.alternatives, self.messages = alternatives, messages
        self.clocks = [0.0] * len(lanes)
        self.session = previous
        self._sharing = [index for index, lane in enumerate(lanes) if lane.shares_target]

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        running: dict[int, Iterator[Event]] = {}
        try:
            sessions = yield from self._read_prompt()
            if self._stopped():
                yield from ((index, Finished(0, "interrupted")) for index in range(len(self.lanes)))
                return
            for index, lane in enumerate(self.lanes):
                running[index] = lane.run(
                    self.prompt,
                    session=sessions.get(index),
                    interrupt=self.interrupt,
                    begun=self.begun,
                    alternatives=self.alternatives if lane is self.lanes[-1] or lane.drafts else 0,
                    messages=self.messages,
                )
            yield from self._take_turns(running)
        except GeneratorExit:
            raise
        except BaseException:
            self.session = None  # its cache may have been left in the middle of a pass
            raise
        finally:
            for events in running.values():
                getattr(events, "close", lambda: None)()

    def _read_prompt(self) -> Generator[tuple[int, Event], None, dict[int, Session]]:
        """Read the prompt once; every sharing lane but the last gets a fork of that session."""
        from sampling.loop import prefill
        from sampling.rows import first_rows
        from sampling.types import states_of

        if not self._sharing:
            return {}
        hidden = states_of(*(self.lanes[index].drafter.traits.needs_hidden for index in self._sharing))
        base = self.engine.open(self.prompt, self.session, hidden=hidden, begun=self.begun)
        self.session = base
        for event in prefill(base, first_rows([self.prompt], base), self._stopped):
            for index in self._sharing:
                yield self._count(index, event)
        *others, last = self._sharing
        return {last: base} | ({} if self._stopped() else {index: base.fork() for index in others})

    def _take_turns(self, running: dict[int, Iterator[Event]]) -> Iterator[tuple[int, Event]]:
        while running:
            index = broadcast(min(running, key=lambda lane: (self.clocks[lane], lane)))
            for event in running[index]:
                yield self._count(index, event)
                if not self.lanes[index].served:
                    break
            else:
                del running[index]

    def _stopped(self) -> bool:
        return broadcast(self.interrupt())

    def _count(self, index: int, event: Event) -> tuple[int, Event]:
        self.clocks[index] += seconds(event)
        return index, event


def timed(events: Iterable[tuple[int, Event]]) -> list[tuple[float, int, Event]]:
    """Return the events with the time of each by its lane's own clock, in that order."""
    clocks: dict[int, float] = {}
    rows = []
    for lane, event in events:
        clocks[lane] = clocks.get(lane, 0.0) + seconds(event)
        rows.append((clocks[lane], lane, event))
    return sorted(rows, key=lambda row: row[0])


def paced(
    events: Iterable[tuple[int, Event]],
    speed: float,
    stop: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Event]]:
    """Yield the events, each when it is due at `speed` (above 0) times its own; end early when stopped. `idle` is
    called before a wait.
    """
    begun = clock()
    for at, lane, event in timed(events):
        if not stop() and at / speed > clock() - begun:
            idle()
        while not stop() and (left := at / speed - (clock() - begun)) > 0:
            sleep(min(left, _NAP))
        if stop():
            return
        yield lane, event


def slowed(
    race: Iterable[tuple[int, Event]],
    times: float,
    stop: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Event]]:
    """Yield a race at 1 / `times` of its speed: it is run first, so that no pause is on a clock or cools a cache, and
    then shown as :func:`paced` does; when that is stopped the rest comes at once.
    """
    run = [(lane, event) for _, lane, event in timed(race)]
    left = iter(run)
    for row in paced(run, 1 / times, stop, clock, sleep, idle):
        next(left)
        yield row
    yield from left
