"""Batches: every row of one goes as it would alone, whoever drafts, however long the rows are and whenever they end.

Greedy texts of 1, 4 and 8 ragged prompts over small random models in float64, caches after rows were dropped, the law
of sampled texts at four rows, and what a batch costs. That single rows are right is proved elsewhere.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import sampling.models.causal
from sampling.drafters.cascade import cascade_of, chain_of
from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Finished, Step
from sampling.gamma.controller import Controller
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.types import Budget, Draft, Drafter, FixedPace, GammaController, Limits, Rows
from tests.sampling.drafters.tables.test_lookup import tables_of
from tests.support.pacing import make_step
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.refusals import refused
from tests.support.runs import answers, decode, emitted, greedy, sampler, steps
from tests.support.students import PrefixLM, make_drafter, make_student, make_target, text
from tests.support.toys import PointDrafter, TableLM, TreeDrafter

V, STOP, LENGTH = 8, 1, 18
FAIL_BELOW = 1e-6
SIZES = [3, 90, 1, 17, 40, 2, 9, 28]  # tokens of the prompts
PROMPTS = [text(50 + size, size, V) for size in SIZES]


@cache
def target() -> Any:
    return make_target(V, seed=10, dtype=torch.float64)


@cache
def alone() -> Rows:
    """Plain decoding, prompt by prompt."""
    lm = CausalLM(target())
    return [answers(lm, [prompt], None, greedy(), length=LENGTH, stop=[STOP])[0] for prompt in PROMPTS]


def student(kind: str, **shape: Any) -> ModelDrafter:
    return make_drafter(make_student(kind, target(), seed=2, dtype=torch.float64, **shape))


def tables(**how: Any) -> LookupDrafter:
    return LookupDrafter(tables_of(*(text(seed, 60, V) for seed in range(4))), **how)


def cascaded(*parts: Drafter, matrix: list[list[int]]) -> Drafter:
    return cascade_of(parts, matrix, 2.0)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "plain": lambda: student("plain", short=[0, 2, 3, 4, 5, 6, 7]),
    "glide": lambda: student("glide", window=12),
    "glide, two layers": lambda: student("glide", num_hidden_layers=2),
    "feature": lambda: student("feature"),
    "stops where unsure": lambda: ModelDrafter(student("plain").lm, least=0.4),
    "ngram": lambda: NgramDrafter(V),
    "ngram, random fill": lambda: NgramDrafter(V, stop_if_unknown=False),
    "tables": tables,
    "match": LookupDrafter,
    "maxgram": MaxGramDrafter,
    "tables+feature": lambda: tables(model=ModelSource(student("feature").lm), learn=True),
    "cascade": lambda: cascaded(student("glide"), MaxGramDrafter(), matrix=[[2, 3], [0, 3]]),
    "cascade of three": lambda: cascaded(
        student("glide"), student("plain"), NgramDrafter(V), matrix=[[1, 1, 0], [0, 1, 0], [0, 0, 2]]
    ),
    "chain": lambda: chain_of([student("feature"), MaxGramDrafter()], [2, 2]),
    "always wrong": lambda: PointDrafter(V, lambda row: (row[-1] + 3) % V if len(row) % 3 else None),
}


@pytest.mark.parametrize("holes", [False, True])
def test_what_is_told_of_many_rows_is_what_is_told_of_each_alone(holes: bool) -> None:
    """Their logits are read together; probabilities and gaps are those of a row by itself."""
    lm, rows = TableLM(V, seed=3), [text(seed, 3, V) for seed in range(24)]
    options = {"length": LENGTH, "gamma": 3, "stop": [STOP]}
    drafted = 0
    together = decode(lm, rows, TreeDrafter(lm, (2, 1, 2), holes=holes), greedy(), **options)
    for row, prompt in enumerate(rows):
        alone = steps(decode(lm, [prompt], TreeDrafter(lm, (2, 1, 2), holes=holes), greedy(), **options))
        for ours, own in zip(steps(together, row), alone, strict=True):
            assert (ours.drafted, ours.parents, ours.path) == (own.drafted, own.parents, own.path)
            assert [*ours.target_p, ours.top2_gap] == pytest.approx([*own.target_p, own.top2_gap], rel=1e-5)
            assert len(ours.target_p) == len(ours.path) + len(ours.rejected)
            drafted += len(ours.drafted)
    assert drafted > 100


class Uneven(FixedPace):
    """Another gamma for each row, none for some."""

    def budget(self, rows: list[int]) -> Budget:
        return Budget([row * 3 % self.value for row in rows])


def said(drafter: Drafter, rows: int, pace: GammaController) -> Rows:
    limits = Limits(LENGTH, frozenset([STOP]))
    return emitted(generate(CausalLM(target()), PROMPTS[:rows], drafter, greedy(), limits, pace=pace), rows)


def test_the_rows_end_at_different_times() -> None:
    assert len({len(row) for row in alone()}) > 3
    assert {row[-1] == STOP for row in alone()} == {True, False}


@pytest.mark.parametrize("rows", [8, *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (1, 4))])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_row_says_what_it_says_alone(name: str, rows: int) -> None:
    assert said(DRAFTERS[name](), rows, Uneven(5) if rows == 8 else FixedPace(4)) == alone()[:rows]


# -- what must be seen ----------------------------------------------------------------------------

real_places = sampling.models.causal.places


def sees_padding(
    lengths: list[int], feed: Rows, parents: Tensor | None, start: int, width: int, count: int
) -> tuple[Tensor, Tensor]:
    """A mutant of `places`: the padding before a short row's tokens is read as if it were tokens."""
    positions, mask = real_places(lengths, feed, parents, start, width, count)
    mask[:, :, start : start + width] |= torch.ones(width + count, width, dtype=torch.bool).tril()
    return positions, mask


def sees_unused_slots(
    lengths: list[int], feed: Rows, parents: Tensor | None, start: int, width: int, count: int
) -> tuple[Tensor, Tensor]:
    """A mutant of `places`: the slots behind a short row's tokens are read as if they held some."""
    positions, mask = real_places(lengths, feed, parents, start, width, count)
    mask[:, :, :start] = True
    return positions, mask


@pytest.mark.parametrize("mutant", [sees_padding, sees_unused_slots])
def test_attention_to_what_is_no_token_is_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone()[:4]
    monkeypatch.setattr(sampling.models.causal, "places", mutant)
    assert said(NoDrafter(), 4, FixedPace(0)) != expected


# -- caches ---------------------------------------------------------------------------------------


@torch.inference_mode()
def test_caches_and_states_are_right_after_rows_were_dropped() -> None:
    """After every round: the next logits, and the hidden states that a feature drafter reads."""
    model, lm, prompts = target(), CausalLM(target()), PROMPTS[:4]
    session, rows, active = lm.open([list(row) for row in prompts], hidden=True), [*map(list, prompts)], [0, 1, 2, 3]
    oracle, counted = PrefixLM(model), Counter[int]()
    for event in generate(
        lm, prompts, student("feature"), greedy(), Limits(LENGTH, frozenset([STOP])), session=session
    ):
        if isinstance(event, Step):
            rows[event.row] = rows[event.row] + list(event.emitted)
        if isinstance(event, Finished):
            active.remove(event.row)
        if not active or len(session.initial) != len(active) or getattr(event, "row", None) != active[-1]:
            continue  # the round is not told to its end
        now, held = [rows[row] for row in active], session.fork().rollback([rows[row] for row in active])
        assert torch.allclose(session.fork().score(now, Draft.empty(len(now)))[:, 0], oracle.logits(now), atol=1e-8)
        for place, (row, count) in enumerate(zip(now, held, strict=True)):
            states = model(input_ids=torch.tensor([row[:count]]), output_hidden_states=True).hidden_states[-1][0]
            assert torch.allclose(session.hidden()[place, :count], states, atol=1e-5)
        counted[len(active)] += 1
    assert len(counted) > 2


# -- who cannot, and who is too long --------------------------------------------------------------


class Lonely(PointDrafter):
    """Follows one row."""

    traits = replace(PointDrafter.traits, names=("lonely",), one_row=True)

    def __init__(self) -> None:
        super().__init__(V, lambda row: 0)


@pytest.mark.parametrize(
    "make",
    [
        Lonely,
        lambda: chain_of([NgramDrafter(V), Lonely()], [1, 1]),
    ],
)
def test_a_drafter_of_one_row_refuses_several_by_its_name(make: Callable[[], Drafter]) -> None:
    assert said(make(), 1, FixedPace(2)) == alone()[:1]
    refused(said, make(), 4, FixedPace(2), match=r"^lonely drafts for one prompt at a time, got 4$")


@pytest.mark.parametrize("reviewing", [False, True])
def test_a_row_too_long_for_the_drafter_does_not_silence_it_for_others(reviewing: bool) -> None:
    lm, small = TableLM(V, seed=1), TableLM(V, seed=1, context=12)
    drafter: Drafter = ModelDrafter(small)
    if reviewing:
        drafter = cascade_of([drafter, NgramDrafter(V)], [[2, 0], [0, 2]])
    rows = [text(7, 20, V), [1, 2], text(8, 12, V)]
    run = decode(lm, rows, drafter, greedy(), length=8, gamma=3)
    assert emitted(run, 3) == [answers(lm, [row], None, greedy(), length=8)[0] for row in rows]
    heard = [sum(len(step.inner if reviewing else step.drafted) for step in steps(run, row)) for row in range(3)]
    assert heard[1] > 1
    assert heard[0] == heard[2] == 0


# -- what a batch costs ---------------------------------------------------------------------------


def play(pace: Controller, rows: list[int], count: int, plain: float, slope: float) -> None:
    """So many rounds in which every draft is right; a pass over n + 1 tokens takes plain · (1 + slope · n) seconds."""
    for _ in range(count):
        gamma = pace.budget(rows).max_depth[0]
        step = make_step(gamma, gamma, gamma, 0.01 * plain * gamma, plain * (1 + slope * gamma))
        shared = {"draft_s": step.draft_s / len(rows), "verify_s": step.verify_s / len(rows)}
        pace.observe([replace(step, row=row, **shared) for row in rows])


def test_the_costs_of_a_batch_are_learned_apart() -> None:
    pace = Controller()
    play(pace, [0, 1, 2, 3], 40, plain=1.0, slope=0.8)
    four = pace.costs
    play(pace, [2], 60, plain=0.3, slope=0.0)
    assert pace.costs is not four
    assert pace.costs.v(2)[1] == pytest.approx(1.0)
    assert (pace.last or 0) > 4
    pace.budget([0, 1, 2, 3])
    assert pace.costs is four
    assert four.plain == pytest.approx(1.0)
    assert four.v(2)[1] == pytest.approx(1.8)


# -- the law --------------------------------------------------------------------------------------

FOUR = [[3, 1, 3, 1, 3], [2], [0, 5], [4, 4, 6, 2, 7, 5, 3, 1, 0, 2]]


def joint(lm: Any, oracle: Any, make: Callable[[], Drafter], calls: int) -> float:
    """p of the texts of four rows that end by a stop token or after three tokens, row by row, in so many batches."""
    found: Counter[Any] = Counter()
    for seed in range(calls):
        rows = answers(lm, FOUR, make(), sampler(1.0, 500 + seed), length=3, gamma=2, stop=[6])
        found.update((place, *row[:2]) for place, row in enumerate(rows))
    law: Counter[Any] = Counter()
    for place, prompt in enumerate(FOUR):
        for row, chance in exact_law(oracle, prompt, NaiveLaw(), 2, [6]).items():
            law[(place, *row)] += chance / 4
    return chi_square_p(found, law)


def law_case(name: str) -> tuple[Any, Any, Callable[[], Drafter]]:
    toy = TableLM(V, seed=21, sharpness=1.2, dtype=torch.float32)
    other = TableLM(V, seed=22, sharpness=1.0, dtype=torch.float32)
    other.table = other.table + toy.table
    if name == "glide":
        small = make_target(V, seed=4)
        pupil = make_student("glide", small, seed=6)
        return CausalLM(small), PrefixLM(small), lambda: make_drafter(pupil)
    makers: dict[str, Callable[[], Drafter]] = {
        "model": lambda: ModelDrafter(other),
        "ngram": lambda: NgramDrafter(V, stop_if_unknown=False),
        "cascade": lambda: cascade_of([ModelDrafter(other), NgramDrafter(V)], [[2, 0], [0, 2]], 2.0),
    }
    return toy, toy, makers[name]


@pytest.mark.parametrize("name", ["model", "glide", "ngram", "cascade"])
def test_four_sampled_rows_have_the_targets_law(name: str) -> None:
    assert joint(*law_case(name), calls=50 if name == "glide" else 100) > FAIL_BELOW


class Swapped(ModelDrafter):
    """A mutant: each row's drafts come with the law of the row beside it."""

    def propose(self, *given: Any) -> Draft:
        draft = super().propose(*given)
        mixed = None if draft.probs is None else (draft.probs.roll(1, dims=0) + 1e-3)
        return replace(draft, probs=mixed if mixed is None else mixed / mixed.sum(dim=-1, keepdim=True))


def test_laws_of_the_wrong_row_are_seen() -> None:
    lm, oracle, make = law_case("model")
    assert joint(lm, oracle, lambda: Swapped(make().lm), calls=200) < FAIL_BELOW  # type: ignore[attr-defined]
