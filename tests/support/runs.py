"""Short ways to run the loop in tests: tokens, events and batches of samples. Decides nothing."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sampling.verify.distributions
import sampling.verify.rules
from sampling.drafters.draft_model import NoDrafter
from sampling.events import Event, Finished, Step
from sampling.loop import generate
from sampling.sampler import KeyedSampler, stream_states
from sampling.stats.metrics import Meter
from sampling.stats.summary import Stats
from sampling.types import LM, Drafter, FixedPace, Limits, Rows, Sampler, Session
from tests.support.branching import BranchingSampler, Law, RowSampler, distance, enumerate_rows, enumerate_runs, softmax
from tests.support.reference import HasLogits, exact_law
from tests.support.toys import ToyLM
from utils.logits_processors import make_processor


def emitted(events: Iterable[Event], rows: int = 1) -> Rows:
    """The tokens of each row."""
    found: Rows = [[] for _ in range(rows)]
    for event in events:
        if isinstance(event, Step):
            found[event.row].extend(event.emitted)
    return found


def sampler(
    temperature: float = 0.0, seed: int = 0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, **options: Any
) -> KeyedSampler:
    """The real sampler of an answer; `options` are its coupling and the like."""
    return KeyedSampler(make_processor(temperature, top_k, top_p, min_p), seed, **options)


def greedy() -> KeyedSampler:
    return sampler()


def after(looks: int) -> Iterator[bool]:
    """An interrupt that comes after so many looks at it: False that often, True from then on."""
    yield from [False] * looks
    while True:
        yield True


def drafting(sampler: Sampler, rows: Rows) -> Sampler:
    """What a drafter draws with in a round that begins behind these rows."""
    return sampler.drafting([(number, len(row)) for number, row in enumerate(rows)])


def measure(events: Iterable[Event], row: int = 0, prompt_n: int = 300) -> Stats:
    """The figures of a whole stream of events."""
    meter = Meter(prompt_n, row)
    for event in events:
        meter.add(event)
    return meter.stats


def reasons(events: Iterable[Event]) -> dict[int, str]:
    """Why each row ended."""
    return {event.row: event.reason for event in events if isinstance(event, Finished)}


def steps(events: Iterable[Event], row: int = 0) -> list[Step]:
    return [event for event in events if isinstance(event, Step) and event.row == row]


def decode(
    lm: LM,
    prompt: Rows,
    drafter: Drafter | None,
    sampler: Sampler,
    *,
    length: int,
    gamma: int = 4,
    stop: Iterable[int] = (),
    session: Session | None = None,
    **more: Any,
) -> list[Event]:
    """All events of one run."""
    return list(
        generate(
            lm,
            prompt,
            drafter or NoDrafter(),
            sampler,
            Limits(length, frozenset(stop)),
            pace=FixedPace(gamma),
            session=session,
            **more,
        )
    )


def answers(lm: LM, prompt: Rows, drafter: Drafter | None, sampler: Sampler, **options: Any) -> Rows:
    """The tokens of each row of one run."""
    return emitted(decode(lm, prompt, drafter, sampler, **options), len(prompt))


def enumeration_error(
    target: Any,
    make_drafter: Callable[[], Drafter],
    *,
    prompt: list[int],
    length: int,
    gamma: int,
    law: Law = softmax,
    drafts: Any = "law",
    stop: Iterable[int] = (),
    together: int = 1,
    oracle: HasLogits | None = None,
) -> float:
    """How far the loop's exact law lies from the target's: the largest error of a probability.

    One row a branch, or where `together` is more than 1 that many branches as rows of one batch: many times quicker.
    `oracle` tells the logits of a target that is no toy.
    """
    options: dict[str, Any] = {"length": length, "gamma": gamma, "stop": stop}

    def run(sampler: BranchingSampler) -> tuple[int, ...]:
        return tuple(answers(target, [prompt], make_drafter(), sampler, **options)[0])

    def run_rows(sampler: RowSampler, rows: int) -> list[tuple[int, ...]]:
        found = answers(target, [list(prompt) for _ in range(rows)], make_drafter(), sampler, **options)
        return [tuple(row) for row in found]

    said = enumerate_runs(run, law, drafts) if together == 1 else enumerate_rows(run_rows, law, drafts, together)
    return distance(said, exact_law(oracle or target, prompt, law, length, stop))


def sample_counts(
    target: ToyLM,
    make_drafter: Callable[[], Drafter],
    make_sampler: Callable[[int], Sampler],
    *,
    prompt: list[int],
    samples: int = 50_000,
    batch: int = 1_000,
    first: int = 3,
    length: int,
    gamma: int = 4,
    stop: Iterable[int] = (),
    at_once: bool = True,
) -> Counter[tuple[int, ...]]:
    """Counts of the first `first` tokens of `samples` answers, drawn as rows of large batches.

    A batch ends with the round in which its last row has them: what rounds behind it emit is not looked at. `at_once`:
    the rows of a round are decided together, as on an accelerator, which is many times quicker and says the same.
    """
    found: Counter[tuple[int, ...]] = Counter()
    assert samples % batch == 0, f"{samples} samples are no whole batches of {batch}"
    with pytest.MonkeyPatch.context() as patch:
        for module in (sampling.verify.distributions, sampling.verify.rules) if at_once else ():
            patch.setattr(module, "at_once", lambda tensor, sampler: not sampler.notes)
        for seed in range(samples // batch):
            rows: Rows = [[] for _ in range(batch)]
            lacking = set(range(batch))
            drafter, sampler = make_drafter(), make_sampler(seed)
            for event in generate(
                target,
                [list(prompt) for _ in range(batch)],
                drafter,
                sampler,
                Limits(length, frozenset(stop)),
                pace=FixedPace(gamma),
                interrupt=lambda lacking=lacking: not lacking,
            ):
                if isinstance(event, Step):
                    rows[event.row] += event.emitted
                    if len(rows[event.row]) >= first:
                        lacking.discard(event.row)
                elif isinstance(event, Finished):
                    lacking.discard(event.row)
            found.update(tuple(row[:first]) for row in rows)
    return found


def tiers(quick: int, full: int) -> list[Any]:
    """Sizes of a proof by counting, as values of a parameter: the default run's, and the exhaustive one's."""
    return [quick, pytest.param(full, marks=pytest.mark.exhaustive)]


def crossed(*values: Iterable[Any]) -> list[Any]:
    """All combinations, as values of several parameters: few with each value go to the default run, all others to the
    exhaustive one.
    """
    parts = [list(enumerate(part)) for part in values]
    quick = [[number % len(part) for part in parts] for number in range(max(map(len, parts)))]
    return [
        pytest.param(
            *(value for _, value in chosen),
            marks=[] if [number for number, _ in chosen] in quick else pytest.mark.exhaustive,
        )
        for chosen in product(*parts)
    ]


Noise = tuple[int, int, tuple[int, ...]]  # seed, stream and the parts of the key


def noise_asked(
    monkeypatch: pytest.MonkeyPatch, remade: Callable[[Any, int, Tensor], Tensor] | None = None
) -> list[Noise]:
    """A list that grows by every key that any keyed sampler asks noise for; `remade` makes its keys anew first."""
    found: list[Noise] = []

    def noted(self: KeyedSampler, stream: int, keys: Tensor) -> Tensor:
        keys = keys if remade is None else remade(self, stream, keys)
        found.extend((self.seed, stream, tuple(parts)) for parts in keys.tolist())
        return stream_states(self.seed, stream, keys)

    monkeypatch.setattr(KeyedSampler, "generator_states", noted)
    return found


def counted_anew(sampler: Any, stream: int, keys: Tensor) -> Tensor:
    """Keys as they were once made: the target's by row and position, all others by a counter of each sampler's own."""
    if stream == 1:
        return keys
    sampler.ticks = getattr(sampler, "ticks", 0) + 1
    return torch.stack([torch.arange(len(keys)), torch.full((len(keys),), sampler.ticks)], dim=1)


def twice(asked: Iterable[Noise]) -> list[Noise]:
    """The noise that was asked for more than once."""
    return [key for key, count in Counter(asked).items() if count > 1]
