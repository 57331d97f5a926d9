"""Students change nothing but the speed: plain (short list), GLIDE and feature drafters through the real loop.

By taking every branch, by counting samples, and by greedy identity; ragged rows, second turns and closed
answers included. The target is a random Llama with a real cache, in a vocabulary of 4, 8 or 40.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sampling.models.cache
from sampling.drafters.draft_heads.dflash import Pard2LM, PardLM
from sampling.drafters.draft_heads.eagle import FeatureDrafter
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_model import ModelDrafter
from sampling.events import Finished
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.types import Budget, Draft, Limits, Rows, Sampler
from tests.support.reference import NaiveLaw, chi_square_p, exact_law, greedy_answer
from tests.support.runs import (
    after,
    answers,
    crossed,
    decode,
    emitted,
    enumeration_error,
    greedy,
    sample_counts,
    sampler,
    steps,
    tiers,
)
from tests.support.students import KINDS, STATES, PrefixLM, make_drafter, make_student, make_target, text

EXACT, FAIL_BELOW = 1e-9, 1e-6
PROMPT = [0, 1, 0]


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches grow by a few slots at a time: 2,500 short rows need no room for 256 more each, and growing is tested."""
    monkeypatch.setattr(sampling.models.cache, "GROW", 8)


# -- every branch ---------------------------------------------------------------------------------


def enumerated(
    kind: str, make: Callable[[ModelDrafter], ModelDrafter], drafts: Any, law: NaiveLaw, length: int = 4, **shape: Any
) -> float:
    """The largest error of a probability of `length` tokens; V = 4, gamma 2, one id outside the student's list."""
    target = make_target(4, seed=3, dtype=torch.float64)
    drafter = make(MASKED[kind](4) if kind in MASKED else make_drafter(make_student(kind, target, [0, 1, 3], **shape)))
    # The opening round draws without a draft: start behind each of its tokens instead of forking there.
    prompt = [*PROMPT, greedy_answer(PrefixLM(target), PROMPT, 1)[0]]
    options = {"length": length, "gamma": 2, "law": law, "drafts": drafts, "oracle": PrefixLM(target)}
    return enumeration_error(CausalLM(target), lambda: drafter, prompt=prompt, **options)


def pard(size: int) -> ModelDrafter:
    """A PARD model of a target's shape, whose mask is the id 2."""
    return ModelDrafter(PardLM(make_target(size, seed=9, dtype=torch.float64), 2))


def pard_2(size: int) -> ModelDrafter:
    """The same, whose inputs hold two states of the target."""
    model, noise = make_target(size, seed=9, dtype=torch.float64), torch.Generator().manual_seed(1)
    weight = torch.randn(24, 48, generator=noise, dtype=torch.float64)
    return ModelDrafter(Pard2LM(model, 2, (-1, 1), weight, weight[:, 0], 0.2))


MASKED = {"pard": pard, "pard-2": pard_2}


def itself(drafter: ModelDrafter) -> ModelDrafter:
    return drafter


@pytest.mark.parametrize(("kind", "drafts"), crossed([*KINDS, "pard", "feature of all states"], ["law", "greedy"]))
def test_the_emitted_law_is_the_targets_to_the_last_digit(kind: str, drafts: str) -> None:
    kind, _, several = kind.partition(" of all ")
    shape: dict[str, Any] = {"reads": STATES, "seed": 6} if several else {}  # its float32 rounds to within 1e-9
    assert enumerated(kind, itself, drafts, NaiveLaw(top_k=2), **shape) < EXACT


class WrongLaw(ModelDrafter):
    """Drafts as `drafter` does and passes up another law than the one drawn from."""

    def __init__(self, drafter: ModelDrafter) -> None:
        super().__init__(drafter.lm)

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        draft = super().propose(rows, budget, sampler)
        if draft.probs is None:
            return draft
        wrong = self.wrong(draft.probs)
        return replace(draft, probs=wrong / wrong.sum(dim=-1, keepdim=True))

    def wrong(self, probs: Tensor) -> Tensor:
        """Weights [B, N, V] in the place of the laws."""
        raise NotImplementedError


class OffByOne(WrongLaw):
    """A mutant: each law is passed up one position late."""

    def wrong(self, probs: Tensor) -> Tensor:
        return probs.roll(1, dims=1).clamp(min=1e-3)


class RawLaw(WrongLaw):
    """A mutant: the law passed up is not the processed one that the draft was drawn from."""

    def wrong(self, probs: Tensor) -> Tensor:
        return (probs + 1e-3).sqrt()


@pytest.mark.parametrize("kind", ["glide", "pard"])
@pytest.mark.parametrize("mutant", [OffByOne, RawLaw])
def test_a_wrong_law_is_seen(mutant: Any, kind: str) -> None:
    assert enumerated(kind, mutant, "law", NaiveLaw(top_k=2)) > 1e-3


# -- counting -------------------------------------------------------------------------------------

V = 8
COUNTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # sampler options, law
    "rejection": ({}, {}),
    "rejection, shaped": ({}, {"temperature": 0.7, "top_p": 0.9}),
    "gumbel, shaped": ({"coupling": "gumbel"}, {"temperature": 0.7, "top_p": 0.9}),
}


def counted(kind: str, case: str, samples: int, law: NaiveLaw | None = None, make: Any = itself) -> float:
    options, shape = COUNTED[case]
    target = make_target(V, seed=4)
    student = None if kind in MASKED else make_student(kind, target, short=[0, 1, 2, 4, 5, 7], seed=6)
    found = sample_counts(
        CausalLM(target),  # type: ignore[arg-type]
        lambda: make(make_drafter(student) if student else MASKED[kind](V)),
        lambda seed: sampler(seed=3000 + seed, **{"temperature": 1.0, **shape, **options}),
        prompt=[3, 1, 3, 1],
        samples=samples,
        batch=min(samples, 2_500),
        length=4,
        gamma=3,
    )
    return chi_square_p(found, exact_law(PrefixLM(target), [3, 1, 3, 1], law or NaiveLaw(**shape), 3))


@pytest.mark.parametrize("samples", tiers(2_500, 20_000))
@pytest.mark.parametrize(("kind", "case"), crossed([*KINDS, "pard"], COUNTED))
def test_sampled_tokens_have_the_targets_law(kind: str, case: str, samples: int) -> None:
    assert counted(kind, case, samples) > FAIL_BELOW


def test_the_count_sees_a_wrong_law() -> None:
    """The same number of samples is enough to convict a mutant, and a target that is a little off."""
    assert counted("feature", "rejection", 2_500, make=OffByOne) < FAIL_BELOW
    assert counted("feature", "rejection", 2_500, law=NaiveLaw(temperature=1.3)) < FAIL_BELOW


# -- greedy ---------------------------------------------------------------------------------------

PROMPTS = [text(31, 9, 8), [5, 6, 7] * 7, [4], [0, 0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize(("kind", "shape"), crossed(KINDS, ["one layer", "two layers"]))
def test_greedy_text_is_plain_decodings_for_every_gamma(kind: str, shape: str) -> None:
    target = make_target(8, seed=10)
    lm = CausalLM(target)
    layers = 2 if shape == "two layers" else 1
    student = make_student(
        kind, target, short=[0, 2, 3, 4, 5, 6, 7], seed=(3 if kind == "eagle" else 4) - layers, num_hidden_layers=layers
    )
    accepted = refused = 0
    for prompt in PROMPTS[:2] if layers == 1 else PROMPTS[2:]:
        alone = answers(lm, [prompt], None, greedy(), length=14)[0]
        drafter = make_drafter(student)
        for gamma in range(1, 9):
            run = decode(lm, [prompt], drafter, greedy(), length=14, gamma=gamma)
            assert emitted(run)[0] == alone, (prompt, gamma)
            accepted += sum(len(step.path) for step in steps(run))
            refused += sum(len(step.drafted) > len(step.path) for step in steps(run))
    assert accepted > 10
    assert refused > 20


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turns_of_a_chat_reuse_the_caches(kind: str) -> None:
    """Three turns, the target's session reused, forked or new; text and drafts are those of fresh sessions."""
    target = make_target(8, seed=10)
    lm = CausalLM(target)
    student = make_student(kind, target, num_hidden_layers=2, seed=2)
    drafter, session, prompt = make_drafter(student), None, [1, 2, 3, 4]
    for turn in range(4):
        session = lm.open([prompt], previous=session, hidden=STATES)
        running = session.fork() if turn == 2 else session
        held = [helper.rollback([prompt])[0] for helper in drafter.sessions]
        found = decode(lm, [prompt], drafter, greedy(), length=12, gamma=3, session=running)
        same_rounds(found, decode(lm, [prompt], make_drafter(student), greedy(), length=12, gamma=3))
        assert not held or held[0] >= len(prompt) - 8, "the cache of the turn before was thrown away"
        prompt = [*prompt, *emitted(found)[0], 5, turn]


def timeless(run: list[Any], row: int = 0) -> list[tuple[Any, ...]]:
    """What was drafted and decided in each round of a row."""
    return [(step.drafted, step.path, step.token) for step in steps(run, row)]


def surety(run: list[Any], row: int = 0) -> list[float]:
    """How sure the drafter was of each examined draft of a row."""
    return [sure for step in steps(run, row) for sure in step.draft_p]


def same_rounds(run: list[Any], other: list[Any], row: int = 0) -> None:
    """The row of `run` went as the only row of `other`: same drafts from the same laws."""
    assert timeless(run, row) == timeless(other)
    assert surety(run, row) == pytest.approx(surety(other), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_closed_answers_leave_usable_sessions(kind: str) -> None:
    target = make_target(8, seed=10)
    lm, prompt = CausalLM(target), PROMPTS[0]
    student = make_student(kind, target, num_hidden_layers=2, seed=2)
    drafter, session = make_drafter(student), lm.open([prompt], hidden=STATES)
    fresh = decode(lm, [prompt], make_drafter(student), greedy(), length=15)
    for looks in (0, 1, 2, 4):
        stopped = decode(lm, [prompt], drafter, greedy(), length=15, session=session, interrupt=after(looks).__next__)
        assert isinstance(stopped[-1], Finished)
    for taken in (1, 3, 5):
        running = generate(lm, [prompt], drafter, greedy(), Limits(15), session=session)
        for _ in range(taken):
            next(running)
        running.close()  # type: ignore[attr-defined]
        same_rounds(decode(lm, [prompt], drafter, greedy(), length=15, session=session), fresh)


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "window"), crossed(KINDS, [0, 6]))
def test_ragged_rows_say_and_draft_what_they_do_alone(kind: str, window: int) -> None:
    """Rows that end at different times: the drafts of each are those of the row by itself."""
    target = make_target(8, seed=10)
    lm, prompts = CausalLM(target), [text(41, 3, 8), text(42, 17, 8), [6]]
    shape = {"window": window} if window else {"num_hidden_layers": 2}
    student = make_student(kind, target, short=[0, 2, 3, 4, 5, 6, 7], seed=2, **shape)
    for gamma in (1, 3, 6):
        options = {"length": 16, "gamma": gamma, "stop": {1}}
        together = decode(lm, prompts, make_drafter(student), greedy(), **options)
        lengths = set()
        for row, prompt in enumerate(prompts):
            same_rounds(together, decode(lm, [prompt], make_drafter(student), greedy(), **options), row)
            lengths.add(len(steps(together, row)))
        assert len(lengths) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_near_the_students_context_end_draft_less_then_nothing(kind: str) -> None:
    target = make_target(8, seed=10)
    lm, prompts = CausalLM(target), [text(43, 9, 8), text(44, 14, 8), text(45, 4, 8)]
    student = make_student(kind, target, seed=2, max_position_embeddings=18)
    run = decode(lm, prompts, make_drafter(student), greedy(), length=12, gamma=4)
    assert emitted(run, 3) == answers(lm, prompts, None, greedy(), length=12)
    for row, prompt in enumerate(prompts):
        length = len(prompt)
        for step in steps(run, row):
            assert length + len(step.drafted) <= max(18, length)
            length += len(step.emitted)
        assert length > 18 or row == 2
    assert all(
        not step.drafted
        for step in steps(decode(lm, [text(46, 30, 8)], make_drafter(student), greedy(), length=5, gamma=4))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_padded_vocabularies_are_cut_alike(kind: str) -> None:
    """Target and student have 8 ids of which 6 exist; the short list reaches beyond them."""
    target = make_target(8, seed=10)
    lm, student = CausalLM(target, vocab_size=6), make_student(kind, target, short=[0, 2, 3, 5, 6, 7], seed=2)
    drafter: Any = {
        "plain": lambda: ModelDrafter(CausalLM(StudentNetwork(student), "plain", 6)),
        "glide": lambda: ModelDrafter(GlideLM(student, 3, vocab_size=6)),
        "feature": lambda: FeatureDrafter(student, vocab_size=6),
        "eagle": lambda: FeatureDrafter(student, vocab_size=6),
    }[kind]()
    for options in ({}, {"coupling": "gumbel"}):
        run = steps(decode(lm, [[1, 2, 3]], drafter, sampler(1.5, seed=3, **options), length=40, gamma=4))
        assert {token for step in run for token in step.drafted} == {0, 2, 3, 5}
