"""`gamma auto` changes no text and no law: the real loop under the real pace, every branch taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sampling.costs import Costs
from sampling.drafters import ModelDrafter, NgramDrafter
from sampling.events import Step
from sampling.loop import generate
from sampling.pace import GAMMA_MAX, GoodputPace
from sampling.sampler import KeyedSampler
from sampling.types import Drafter, Limits
from tests.branching import BranchingSampler, distance, enumerate_runs, softmax
from tests.pacing import flat, packed, unpacked
from tests.reference import exact_law
from tests.runs import answers, emitted, steps
from tests.toy_drafters import LawDrafter, PointDrafter
from tests.toys import TableLM
from utils.logits_processors import make_processor

WORLDS = [(flat, 0.05), (packed, 0.02), (packed, 0.05), (packed, 0.2), (unpacked, 0.05), (unpacked, 0.2)]
KNOWN = dict.fromkeys(range(2, GAMMA_MAX + 2), 1.0)  # a measured flat table: no first looks


class Planted(GoodputPace):
    """The real pace under a clock that depends on nothing but the widths, so that runs can be repeated."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.asked: list[int] = []

    def gamma(self, rows: list[int]) -> list[int]:
        found = super().gamma(rows)
        self.asked.append(found[0])
        return found

    def observe(self, step: Step) -> None:
        width = len(step.drafted)
        super().observe(replace(step, draft_s=0.05 * width, verify_s=1 + 0.03 * width))


def run_with(
    pace: GoodputPace, lm: TableLM, drafter: Drafter, sampler: Any, length: int, rows: int = 1
) -> list[list[int]]:
    events = list(
        generate(lm, [[0, 1, 0 + row % 2] for row in range(rows)], drafter, sampler, Limits(length), pace=pace)
    )
    return emitted(events, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", ["ngram", "model", "wrong"])
def test_auto_gives_plain_decodings_text(temperature: float, rows: int, make: str) -> None:
    """Greedy, and with keyed noise under gumbel coupling (the n-gram's point masses need none)."""
    lm, prompt = TableLM(6, seed=3, sharpness=4.0), [[0, 1, row % 2] for row in range(rows)]
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(6),
        "model": lambda: ModelDrafter(TableLM(6, seed=3, sharpness=2.0)),
        "wrong": lambda: PointDrafter(6, lambda row: 5),
    }
    for seed in range(3):
        sampler = lambda: KeyedSampler(make_processor(temperature, 0, 1.0, 0.0), seed, coupling="gumbel")  # noqa: B023, E731
        pace = Planted()
        assert run_with(pace, lm, makers[make](), sampler(), 90, rows) == answers(
            lm, prompt, None, sampler(), length=90
        )
        assert len(set(pace.asked)) > 1


@pytest.mark.parametrize("least_top", [0.0, 0.55])
def test_enumeration_is_exact_under_a_gamma_that_follows_past_rounds(least_top: float) -> None:
    """Drafts from a law: every branch is taken, gammas differing from branch to branch with what was accepted."""
    target, prompt = TableLM(3, seed=2), [0, 1, 0]
    seen: set[tuple[int, ...]] = set()

    def run(sampler: BranchingSampler) -> tuple[int, ...]:
        pace = Planted(gamma_max=2, costs=Costs(c=0.45, table={2: 1.0, 3: 1.0}))
        drafter = LawDrafter(TableLM(3, seed=9), least_top)
        found = tuple(run_with(pace, target, drafter, sampler, 4)[0])
        seen.add(tuple(pace.asked))
        return found

    assert distance(enumerate_runs(run, softmax), exact_law(target, prompt, softmax, 4)) < 1e-9
    assert len(seen) > 1


def test_a_pace_that_sees_the_fate_of_the_tested_token_is_caught() -> None:
    """The control: resuming or stopping by the very draft under test bends the law, and the enumeration sees it."""
    target, prompt = TableLM(3, seed=2), [0, 1, 0]

    class Peeking(LawDrafter):
        def chain(self, name: int, row: list[int], want: int, sampler: Any) -> list[Any]:
            drafted = super().chain(name, row, want, sampler)
            return drafted if drafted and drafted[0][0] != 0 else []  # drops a token already drawn

    def run(sampler: BranchingSampler) -> tuple[int, ...]:
        pace = Planted(gamma_max=2, costs=Costs(c=0.05, table={2: 1.0, 3: 1.0}))
        return tuple(run_with(pace, target, Peeking(TableLM(3, seed=9)), sampler, 4)[0])

    assert distance(enumerate_runs(run, softmax), exact_law(target, prompt, softmax, 4)) > 1e-3


def test_the_length_limit_is_not_taken_for_silence() -> None:
    """Near its end a row is asked for less; the pace is told what was asked."""
    lm = TableLM(4, seed=1, sharpness=9.0)
    pace = Planted(costs=Costs(c=0.01, table=KNOWN))
    events = list(
        generate(lm, [[0, 1]], ModelDrafter(lm), KeyedSampler(make_processor(0, 0, 1, 0)), Limits(9), pace=pace)
    )
    assert len(steps(events)[1].drafted) < steps(events)[1].gamma
    assert min(pace.acceptance.alphas) >= 0.85
