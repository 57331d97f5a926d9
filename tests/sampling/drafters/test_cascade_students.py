"""Trained students inside cascades, as reviewers and in the last place: nothing but the speed changes.

The target is a random Llama with a real cache, the students are random too (tests/support/students.py).
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import sampling.models.cache
from sampling.drafters.cascade import CascadeDrafter, ChainDrafter, cascade_of
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.events import Step
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, FixedPace, Limits, Rows
from sampling.verify.rules import Review
from tests.support.reference import NaiveLaw, chi_square_p, exact_law, greedy_answer
from tests.support.runs import (
    answers,
    crossed,
    decode,
    drafting,
    emitted,
    enumeration_error,
    greedy,
    sample_counts,
    sampler,
    steps,
    tiers,
)
from tests.support.students import PrefixLM, close, fed, make_drafter, make_student, make_target, text
from tests.support.toys import PointDrafter

V = 8
EXACT, FAIL_BELOW = 1e-9, 1e-6
SHORT = [0, 2, 3, 4, 5, 6, 7]  # 1 is outside every student's list
PROMPTS = [text(31, 9, V), [5, 6, 7] * 7, [4], [0, 0, 0, 0, 0, 0, 1]]
CASES: dict[str, tuple[list[str], list[list[int]]]] = {
    "plain < maxgram": (["plain", "maxgram"], [[3, 2], [0, 3]]),
    "glide < maxgram": (["glide", "maxgram"], [[3, 2], [0, 3]]),
    "glide < plain": (["glide", "plain"], [[3, 2], [0, 2]]),
    "glide < plain < maxgram": (["glide", "plain", "maxgram"], [[3, 2, 2], [0, 1, 2], [0, 0, 3]]),
    "glide < feature": (["glide", "feature"], [[3, 1], [0, 2]]),
}
COUNTED: dict[str, tuple[list[str], list[list[int]]]] = {
    "plain < points": (["plain", "points"], [[2, 1], [0, 2]]),
    "glide < points": (["glide", "points"], [[2, 1], [0, 2]]),
    "glide < plain": (["glide", "plain"], [[2, 0], [0, 2]]),
}


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches grow by a few slots at a time: 2,500 short rows need no room for 256 more each, and growing is tested."""
    monkeypatch.setattr(sampling.models.cache, "GROW", 8)


def points(vocab: int = V) -> PointDrafter:
    """A stand-in for max-gram that always speaks."""
    return PointDrafter(vocab, lambda row: (row[-1] + 1) % vocab)


def student(kind: str, target: Any, layers: int = 1, short: list[int] | None = SHORT) -> Any:
    return make_student(kind, target, short=short, seed=4 - layers, num_hidden_layers=layers)


def cascade(case: str, target: Any, lenience: float = 1.0, layers: int = 1) -> ChainDrafter:
    kinds, matrix = (CASES | COUNTED)[case]
    special = {"maxgram": MaxGramDrafter, "points": points}
    parts = [special[kind]() if kind in special else make_drafter(student(kind, target, layers)) for kind in kinds]
    return cascade_of(parts, matrix, lenience)


# -- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "shape"), crossed(CASES, [(1.0, 2), (3.0, 1)]))
def test_greedy_text_is_plain_decodings(case: str, shape: tuple[float, int]) -> None:
    """For every limit: a smaller gamma cuts the drafts, nothing else. Prompts alone, and as the rows of one batch."""
    target = make_target(V, seed=10)
    lm, drafter = CausalLM(target), cascade(case, target, *shape)
    fates = Counter[tuple[str, bool]]()
    plain = [answers(lm, [prompt], None, greedy(), length=14)[0] for prompt in PROMPTS]
    batched = [(gamma, PROMPTS, plain) for gamma in (1, 2, 3, 5)]
    most = drafter.traits.most
    for gamma, rows, wanted in [*batched, *((most, [row], [said]) for row, said in zip(PROMPTS, plain, strict=True))]:
        run = decode(lm, rows, drafter, greedy(), length=14, gamma=gamma)
        assert emitted(run, len(rows)) == wanted, (rows, gamma)
        for step in (step for row in range(len(rows)) for step in steps(run, row)):
            assert len(step.drafted) <= gamma
            fates.update(
                (drafter.traits.names[step.source[node]], node in step.path) for node in range(len(step.drafted))
            )
    reviewer, last = drafter.traits.names[0], CASES[case][0][-1]
    assert {(reviewer, True), (reviewer, False), (last, True), (last, False)} <= set(fates)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_batch_go_as_they_do_alone(case: str) -> None:
    target = make_target(V, seed=10)
    lm, prompts = CausalLM(target), [text(41, 3, V), text(42, 17, V), [6]]
    options = {"length": 16, "gamma": 64, "stop": {1}}
    together = decode(lm, prompts, cascade(case, target, 2.0, 2), greedy(), **options)
    lengths = set()
    for row, prompt in enumerate(prompts):
        alone = steps(decode(lm, [prompt], cascade(case, target, 2.0, 2), greedy(), **options))
        assert [fate(step) for step in steps(together, row)] == [fate(step) for step in alone]
        lengths.add(len(alone))
    assert len(lengths) > 1


def fate(step: Step) -> Any:
    return step.drafted, step.source, step.path, step.token, [fate(inner) for inner in step.inner]


@pytest.mark.parametrize("case", CASES)
def test_the_next_turns_of_a_chat_reuse_the_caches(case: str) -> None:
    target = make_target(V, seed=10)
    lm, drafter, session, prompt = CausalLM(target), cascade(case, target, 2.0, 2), None, [1, 2, 3, 4]
    for turn in range(3):
        session = lm.open([prompt], previous=session, hidden=True)
        held = [helper.rollback([prompt])[0] for helper in drafter.sessions]
        found = decode(lm, [prompt], drafter, greedy(), length=12, gamma=64, session=session)
        fresh = decode(lm, [prompt], cascade(case, target, 2.0, 2), greedy(), length=12, gamma=64)
        assert [fate(step) for step in steps(found)] == [fate(step) for step in steps(fresh)]
        assert all(count >= len(prompt) - 8 for count in held), "the cache of the turn before was thrown away"
        prompt = [*prompt, *emitted(found)[0], 5, turn]


# -- short lists ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "glide"])
@pytest.mark.parametrize(
    "sampler",
    [
        greedy(),
        sampler(1.0, 1),
        sampler(1.0, 1, coupling="gumbel"),
        sampler(1.0, 1, draft_sampling="greedy"),
    ],
    ids=["greedy", "rejection", "gumbel", "greedy drafts"],
)
def test_an_id_that_a_reviewer_does_not_know_is_refused(kind: str, sampler: KeyedSampler) -> None:
    """However lenient it is; ids it knows pass now and then, and are told by their own numbers."""
    target = make_target(V, seed=10)
    leaf = PointDrafter(V, lambda row: 1 if len(row) % 3 == 0 else (row[-1] + len(row)) % V)
    drafter = cascade_of([make_drafter(student(kind, target)), leaf], [[4, 0], [0, 3]], 50.0)
    run = steps(decode(CausalLM(target), [[1, 2, 3, 4]], drafter, sampler, length=60, gamma=64))
    reviews = [inner for step in run for inner in step.inner]
    refused = [inner for inner in reviews if any(inner.drafted[node] == 1 for node in inner.rejected)]
    assert refused
    assert all(inner.target_p[len(inner.path)] == 0 for inner in refused)
    let = Counter(token for inner in reviews for token in inner.emitted)
    assert 1 not in let
    assert len(let) > 3
    assert any(inner.path for inner in reviews)
    assert all(step.drafted[node] != 1 for step in run for node in range(len(step.drafted)))


def test_laws_that_are_passed_up_cover_all_ids() -> None:
    """GLIDE with a list of its own over a plain student with another one."""
    target = make_target(V, seed=10)
    lm, rows = CausalLM(target), [[1, 2, 3, 4]]
    parts = [make_drafter(student("glide", target, short=[0, 2, 3, 5])), make_drafter(student("plain", target))]
    drafter = cascade_of(parts, [[6, 0], [0, 2]], 2.0)
    drawn = Counter[int]()
    for seed in range(20):
        session = lm.open(rows)
        session.score([row[:-1] for row in rows], Draft.empty(1))
        drafter.start(rows, session, session)
        draft = drafter.propose(rows, Budget([6]), drafting(sampler(1.0, seed), rows))
        assert draft.probs is not None
        assert draft.probs.shape == (1, draft.width, V)
        assert torch.allclose(draft.probs.sum(dim=-1), torch.tensor(1.0), atol=1e-5)
        assert bool((draft.probs[..., [1, 4, 6, 7]] == 0).all())
        assert bool((draft.probs.gather(2, torch.tensor(draft.tokens)[..., None]) > 0).all())
        drawn.update(draft.tokens[0])
    assert set(drawn) == {0, 2, 3, 5}


# -- the law --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lenience", [1.0, 3.0])
@pytest.mark.parametrize("drafts", ["law", "greedy"])
def test_glide_over_point_masses_emits_the_targets_law_to_the_last_digit(drafts: Any, lenience: float) -> None:
    """V = 4, two of them likely, one outside the student's list; three tokens behind the opening one."""
    target, law = make_target(4, seed=3, dtype=torch.float64), NaiveLaw(top_k=2)
    oracle = PrefixLM(target)
    drafter = cascade_of(
        [make_drafter(make_student("glide", target, short=[0, 1, 3])), points(4)], [[1, 1], [0, 1]], lenience
    )
    prompt = [0, 1, 0, greedy_answer(oracle, [0, 1, 0], 1)[0]]
    options = {"length": 4, "gamma": 64, "law": law, "drafts": drafts, "oracle": oracle}
    assert enumeration_error(CausalLM(target), lambda: drafter, prompt=prompt, **options) < EXACT


SAMPLERS: dict[str, dict[str, Any]] = {"rejection": {}, "gumbel": {"coupling": "gumbel"}}


def counted(case: str, way: str, lenience: float, samples: int, law: NaiveLaw | None = None) -> float:
    target = make_target(V, seed=4)
    found = sample_counts(
        CausalLM(target),  # type: ignore[arg-type]
        lambda: cascade(case, target, lenience),
        lambda seed: sampler(1.0, seed=7000 + seed, **SAMPLERS[way]),
        prompt=[3, 1, 3, 1],
        samples=samples,
        batch=2_500,
        length=4,
        gamma=64,
    )
    return chi_square_p(found, exact_law(PrefixLM(target), [3, 1, 3, 1], law or NaiveLaw(), 3))


@pytest.mark.parametrize("samples", tiers(2_500, 20_000))
@pytest.mark.parametrize(("case", "way"), crossed(COUNTED, SAMPLERS))
def test_sampled_tokens_have_the_targets_law(case: str, way: str, samples: int) -> None:
    assert counted(case, way, 3.0, samples) > FAIL_BELOW


def test_the_count_sees_a_target_that_is_a_little_off() -> None:
    assert counted("glide < points", "rejection", 3.0, 2_500, law=NaiveLaw(temperature=1.3)) < FAIL_BELOW


# -- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "layers"), crossed(["plain < maxgram", "glide < maxgram", "glide < plain < maxgram"], [1, 2])
)
def test_every_review_is_that_of_a_fresh_session(case: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a proposal too, where the reviewer has read tokens that nobody has committed."""
    audited, real = Counter[str](), CascadeDrafter.review

    def looked(self: CascadeDrafter, rows: Rows, draft: Draft, *more: Any) -> tuple[Review, Draft, Tensor | None]:
        session: Any = self.model.session
        found = real(self, rows, draft, *more)
        fresh: Any = self.model.lm.open(rows, target=getattr(session, "target", None))
        wanted, got = fresh.score_reduced(rows, draft), found[0].verdict.logits
        for place, tokens in enumerate(draft.tokens):
            depth = 1 + len(tokens)
            close(got[place, :depth, : wanted.shape[-1]], wanted[place, :depth])
        audited[self.model.lm.name] += 1
        return found

    monkeypatch.setattr(CascadeDrafter, "review", looked)
    target = make_target(V, seed=10)
    for prompts in (PROMPTS[:1], [text(41, 3, V), text(42, 17, V), [6]]):
        decode(CausalLM(target), prompts, cascade(case, target, 3.0, layers), greedy(), length=24, gamma=64)
    assert min(audited[name] for name in CASES[case][0][:-1]) > 15


@pytest.mark.parametrize(
    ("case", "layers"), crossed(["plain < maxgram", "glide < maxgram", "glide < plain < maxgram"], [1, 2])
)
def test_after_every_round_a_reviewer_says_what_a_fresh_one_does(case: str, layers: int) -> None:
    target = make_target(V, seed=10)
    lm, drafter, prompt = CausalLM(target), cascade(case, target, 2.0, layers), PROMPTS[0]
    row, session = list(prompt), lm.open([prompt])
    pace = FixedPace(drafter.traits.most)
    for event in generate(lm, [prompt], drafter, greedy(), Limits(24), pace=pace, session=session):
        row += emitted([event])[0]
        beside = fed(target, [row], [len(row) - 1])
        for member in drafter.members:
            if isinstance(member, ModelDrafter) and member.model.session is not None:
                fresh = member.lm.open([row], target=beside)
                fresh.score([row[:-1]], Draft.empty(1))
                close(member.model.session.fork().score([row], Draft.empty(1)), fresh.score([row], Draft.empty(1)))
    assert len(row) == len(prompt) + 24
