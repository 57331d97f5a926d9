"""What drafting costs by the drafter's own `propose`, and where the time of a round of the real loop goes.

Knows no texts: the prompt repeats itself, so that a drafter that looks tokens up finds them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.lane import Lane, make_sampler
from app.lanes import Engine
from app.settings import Settings
from sampling.events import Step
from sampling.types import Limits
from utils.timing import Stopwatch

GAMMA = 4  # drafts a round
ROUNDS = 40
PERIOD = 7  # of the prompt
Pass = Callable[[], object]


@dataclass(frozen=True)
class Round:
    """Seconds that the parts of a round take (medians over rounds), and of a drafted token within them."""

    verifying: float
    drafting: float
    sampling: float
    overhead: float
    drafted: float | None  # None: nothing was drafted
    rounds: int

    @property
    def seconds(self) -> float:
        return self.verifying + self.drafting + self.sampling + self.overhead

    def __str__(self) -> str:
        parts = ("verifying", "drafting", "sampling", "overhead")
        shares = (f"{name} {100 * getattr(self, name) / self.seconds:.1f}%" for name in parts)
        return f"a round: {', '.join(shares)} of {self.seconds * 1e3:.1f} ms ({self.rounds} rounds, gamma {GAMMA})"


def drafting_lane(
    engine: Engine, settings: Settings, context: int, rounds: int = ROUNDS, method: str = "spec"
) -> tuple[Lane, list[int]]:
    """A drafting lane at gamma 4 (the pair's own, if no method is named), with room for so many rounds and no stop,
    and a prompt for it."""
    lane = engine.lane(method, settings.changed(gamma=GAMMA))
    length = max(1, min(context, lane.context // 2))
    room = min(rounds * (GAMMA + 1) + 2, lane.context - length)
    prompt = [place % PERIOD for place in range(length)]
    return replace(lane, limits=Limits(room, frozenset(), lane.context)), prompt


def proposals(lane: Lane, prompt: list[int]) -> dict[int, Pass]:
    """For 1 … 4 drafts the drafter's own `propose` behind the opening round; {} where it drafts nothing."""
    if not lane.drafts:
        return {}
    opening = lane.run(prompt)
    opened = any(isinstance(event, Step) for event in opening)
    assert opened
    # Whatever the target said: a prompt that goes on repeating itself gives a drafter that looks tokens up its chance.
    rows, sampler = [[*prompt, len(prompt) % PERIOD]], make_sampler(lane.settings).drafting()
    lengths = {count: lane.drafter.propose(rows, [count], sampler).tokens.shape[1] for count in range(1, GAMMA + 1)}

    def one(count: int) -> Pass:
        return lambda: (lane.drafter.propose(rows, [count], sampler), opening)  # held: the drafter reads its session

    return {count: one(count) for count, length in lengths.items() if length == count}


def measure_rounds(lane: Lane, prompt: list[int], rounds: int = ROUNDS) -> Round:
    """Run the real loop for so many rounds and take the medians; overhead is all that is none of the other parts."""
    found: list[tuple[float, float, float, float]] = []
    drafted: list[float] = []
    events = lane.run(prompt)
    opened = any(isinstance(event, Step) for event in events)  # up to the opening round, which drafts nothing
    assert opened
    watch = Stopwatch(getattr(lane.lm, "device", None))
    for event in events:
        whole = watch.lap()
        if isinstance(event, Step):
            parts = (event.verify_s, event.draft_s, event.sample_s)
            found.append((*parts, max(0.0, whole - sum(parts))))
            drafted += [event.draft_s / len(event.drafted)] if event.drafted else []
        if len(found) >= rounds:
            break
    events.close()  # type: ignore[attr-defined]  # a generator
    verifying, drafting, sampling, overhead = (statistics.median(part) for part in zip(*found, strict=True))
    each = statistics.median(drafted) if drafted else None
    return Round(verifying, drafting, sampling, overhead, each, len(found))
