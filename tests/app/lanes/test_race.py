"""Lanes take turns by their own clocks, share one reading of the prompt, and stop together."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.lanes.race import Race, slowed
from sampling.drafters.draft_model import NoDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Event, Finished, Prefill, Step
from sampling.loop import generate
from sampling.sampler import KeyedSampler
from sampling.types import FixedPace, Limits
from tests.support.toys import TableLM
from utils.logits_processors import GreedyProcessor
from utils.progress import never

PROMPT = [number % 7 for number in range(600)]


def step(token: int, seconds: float) -> Step:
    return Step(0, 0, (), (), (), (), token, (), (), 1.0, (), 0.0, seconds, 0.0)


class Fake:
    """A lane whose every round takes `seconds`; it never looks at a session."""

    shares_target = drafts = served = False

    def __init__(self, name: str, seconds: float, rounds: int) -> None:
        self.name, self.seconds, self.rounds = name, seconds, rounds
        self.closed = False

    def run(self, prompt: list[int], *, session: Any, interrupt: Callable[[], bool], **_: Any) -> Iterator[Event]:
        try:
            for token in range(self.rounds):
                if interrupt():
                    yield Finished(0, "interrupted")
                    return
                yield step(token, self.seconds)
            yield Finished(0, "length")
        finally:
            self.closed = True


class Toy:
    """A lane of the real loop over a toy target; `engine` opens the target."""

    shares_target, needs_hidden, drafts, served = True, False, False, False

    def __init__(self, lm: TableLM, drafter: Any = None, length: int = 12) -> None:
        self.name, self.lm, self.drafter, self.length = "toy", lm, drafter or NoDrafter(), length

    def run(
        self, prompt: list[int], *, session: Any, interrupt: Callable[[], bool] = never, **_: Any
    ) -> Iterator[Event]:
        sampler = KeyedSampler(GreedyProcessor(), 0)
        limits = Limits(self.length)
        return generate(
            self.lm, [prompt], self.drafter, sampler, limits, pace=FixedPace(4), session=session, interrupt=interrupt
        )


class Engine:
    def __init__(self, lm: TableLM) -> None:
        self.lm = lm

    def open(
        self, prompt: list[int], previous: Any = None, *, hidden: bool = False, begun: tuple[int, ...] = ()
    ) -> Any:
        return self.lm.open([prompt], previous=previous, hidden=hidden)


def ids(events: list[tuple[int, Event]], lane: int) -> list[int]:
    return [token for index, event in events if index == lane and isinstance(event, Step) for token in event.emitted]


def test_the_lane_that_is_behind_goes_next() -> None:
    race = Race([Fake("slow", 3.0, 3), Fake("fast", 1.0, 6)], None, PROMPT)  # type: ignore[arg-type]
    assert [index for index, event in race if isinstance(event, Step)] == [0, 1, 1, 1, 0, 1, 1, 1, 0]
    assert race.clocks == [9.0, 6.0]


def test_the_consumers_time_is_on_no_clock() -> None:
    import time

    race = Race([Fake("a", 0.001, 5), Fake("b", 0.001, 5)], None, PROMPT)  # type: ignore[arg-type]
    for _ in race:
        time.sleep(0.01)
    assert race.clocks == pytest.approx([0.005, 0.005])


def test_the_prompt_is_read_once_and_put_on_every_clock() -> None:
    lm = TableLM(7, seed=1)
    events = list(Race([Toy(lm), Toy(lm, NgramDrafter(7))], Engine(lm), PROMPT))
    pieces = [(index, event.done) for index, event in events if isinstance(event, Prefill)]
    assert pieces == [(0, 256), (1, 256), (0, 512), (1, 512), (0, 599), (1, 599)]
    assert lm.fed < 2 * len(PROMPT)
    assert ids(events, 0) == ids(events, 1)
    assert len(ids(events, 0)) == 12


def test_the_last_lanes_session_serves_the_next_turn() -> None:
    lm = TableLM(7, seed=1)
    race = Race([Toy(lm), Toy(lm)], Engine(lm), PROMPT)
    answer = ids(list(race), 1)
    before = lm.fed
    list(Race([Toy(lm)], Engine(lm), [*PROMPT, *answer, 1, 2, 3], race.session))
    assert lm.fed - before < 30


def test_closing_in_the_middle_closes_the_lanes_and_keeps_a_sound_session() -> None:
    lanes = [Fake("a", 1.0, 9), Fake("b", 1.0, 9)]
    events = iter(Race(lanes, None, PROMPT))  # type: ignore[arg-type]
    next(events), next(events)
    events.close()  # type: ignore[attr-defined]
    assert [lane.closed for lane in lanes] == [True, True]
    lm = TableLM(7, seed=2)
    race = Race([Toy(lm), Toy(lm)], Engine(lm), PROMPT)
    running = iter(race)
    for _ in range(11):
        next(running)
    running.close()  # type: ignore[attr-defined]
    after = Race([Toy(lm)], Engine(lm), PROMPT, race.session)
    assert ids(list(after), 0) == ids(list(Race([Toy(lm)], Engine(lm), PROMPT)), 0)


def test_an_error_in_one_lane_ends_the_race_without_a_session() -> None:
    class Broken(Fake):
        def run(self, prompt: list[int], *, session: Any, interrupt: Callable[[], bool], **_: Any) -> Iterator[Event]:
            yield step(1, 0.5)
            raise RuntimeError("out of memory")

    other = Fake("other", 1.0, 5)
    lm = TableLM(7, seed=2)
    race = Race([other, Broken("broken", 1.0, 5)], None, PROMPT, previous=lm.open([PROMPT]))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of memory"):
        list(race)
    assert race.session is None
    assert other.closed


def test_a_lane_of_another_model_reads_the_prompt_itself() -> None:
    target, drafter = TableLM(7, seed=1), TableLM(7, seed=4)

    class Own(Toy):
        shares_target = False

    events = list(Race([Own(drafter), Toy(target)], Engine(target), PROMPT))
    done = [(index, event.done) for index, event in events if isinstance(event, Prefill)]
    assert sorted(done) == [(0, 256), (0, 512), (0, 599), (1, 256), (1, 512), (1, 599)]
    assert target.fed < 2 * len(PROMPT)
    assert ids(events, 0) == ids(list(Race([Own(drafter)], Engine(target), PROMPT)), 0)


def test_a_slowed_race_is_run_first_and_then_shown_at_one_speed_for_all() -> None:
    """No pause falls between two passes, so the figures are those of a race that nobody slowed."""
    one = step(5, 1.0)
    events = [(0, Prefill(3, 3, 2.0)), (1, Prefill(3, 3, 0.5)), (1, one), (0, one), (1, Finished(0, "eos"))]
    now: list[float] = [0.0]
    decoded: list[float] = []
    idle: list[float] = []
    naps: list[float] = []

    def race() -> Iterator[tuple[int, Event]]:
        for one in events:
            decoded.append(now[0])
            yield one

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds

    shown = [
        (round(now[0], 6), lane)
        for lane, _ in slowed(race(), 8, lambda: False, lambda: now[0], sleep, idle=lambda: idle.append(now[0]))
    ]
    assert decoded == [0.0] * 5
    assert shown == [(4.0, 1), (12.0, 1), (12.0, 1), (16.0, 0), (24.0, 0)]
    assert len(idle) == 4  # what is new is drawn before each wait
    stopped = [len(naps)]
    rest = slowed(iter(events), 1000, lambda: len(naps) > stopped[0] + 2, sleep=sleep)
    assert sorted(lane for lane, _ in rest) == [0, 0, 1, 1, 1]
