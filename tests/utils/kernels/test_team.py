"""How many threads a run of the kernels takes: a team gives way while others want its cores."""

from __future__ import annotations

from utils.kernels.team import LONGEST, SHORTEST, Pace


def test_a_quiet_machine_keeps_the_team() -> None:
    pace = Pace()
    for now in range(100):
        pace.ran(slept=0.0002, seconds=0.002, now=now)
        assert pace.threads(2, now) == 2


def test_two_runs_that_mostly_slept_bring_one_thread_for_a_while() -> None:
    pace = Pace()
    pace.ran(slept=0.05, seconds=0.06, now=0.0)
    assert pace.threads(2, 0.0) == 2, "one slow run may be an accident"
    pace.ran(slept=0.05, seconds=0.06, now=1.0)
    assert pace.threads(2, 1.0 + SHORTEST / 2) == 1
    assert pace.threads(2, 1.0 + SHORTEST) == 2


def test_each_try_that_fails_waits_longer_and_calm_runs_end_that() -> None:
    pace, now, waits = Pace(), 0.0, list[float]()
    pace.ran(slept=1, seconds=1, now=now)
    for _ in range(8):
        pace.ran(slept=1, seconds=1, now=now)
        waits.append(pace.until - now)
        now = pace.until
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST
    for _ in range(8):
        pace.ran(slept=0, seconds=1, now=now)
    pace.ran(slept=1, seconds=1, now=now)
    assert pace.threads(2, now) == 2
    pace.ran(slept=1, seconds=1, now=now)
    assert pace.until - now == SHORTEST
