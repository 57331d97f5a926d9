"""Cascades as drafters: batches, reviewers that are passed over, how long a proposal may be, who is told what.
That the output is the target's is proved in test_cascade_exact.py; a review by hand is in test_review.py.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sampling.cascades import cascade_of, chain_of
from sampling.drafters import FeatureDrafter, MaxGramDrafter, ModelDrafter, NgramDrafter, TablesDrafter
from sampling.drafters.cascade import Reviewer
from sampling.drafters.chain import ChainDrafter
from sampling.events import Step
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Rows, Sampler, Session, Verdict
from tests.reference import greedy_answer
from tests.runs import answers, decode, emitted, steps
from tests.students import make_student, make_target
from tests.toy_drafters import LawDrafter, PointDrafter
from tests.toys import TableLM, ToyLM, chain_lm
from utils.errors import UserError
from utils.logits_processors import make_processor

NOTHING: Any = None
V = 8


def sampler(temperature: float = 0.0, seed: int = 0, **options: Any) -> KeyedSampler:
    return KeyedSampler(make_processor(temperature), seed, **options)


def base(**options: Any) -> TableLM:
    return TableLM(V, 2, name="base", **options)


def small(**options: Any) -> TableLM:
    return TableLM(V, 3, name="small", **options)


def target(**options: Any) -> TableLM:
    return TableLM(V, 1, name="target", **options)


def three(lenience: float = 1.0) -> ChainDrafter:
    """The models share most of their tables, so that much is accepted and much is not."""
    models = [mixed(lm) for lm in (base(), small())]
    return cascade_of([*map(ModelDrafter, models), MaxGramDrafter()], [[3, 3, 4], [0, 1, 4], [0, 0, 4]], lenience)


def mixed(lm: TableLM, share: float = 0.5) -> TableLM:
    lm.table = (1 - share) * lm.table + share * target().table
    return lm


def timeless(run: list[Step]) -> list[Any]:
    """What was drafted, by whom and with what end in each round, at every level; calls without their seconds."""
    return [
        (step.drafted, step.source, step.path, step.token, calls_of(step), timeless(list(step.inner))) for step in run
    ]


def calls_of(step: Step) -> list[tuple[str, int]]:
    return [(call.model, call.passes) for call in step.calls]


# -- batches --------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 5, 6]]


class Numbered(KeyedSampler):
    """Draws for its only row as for row `number` of a batch."""

    number = 0

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        return super().draw(probs, keys + torch.tensor([self.number, 0]))


POINTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "gumbel": {"temperature": 1.0, "coupling": "gumbel"},
    "greedy drafts": {"temperature": 1.0, "draft_sampling": "greedy"},
}


@pytest.mark.parametrize("lenience", [1.0, 3.0])
@pytest.mark.parametrize("case", POINTS)
def test_rows_of_a_batch_go_as_they_do_alone(case: str, lenience: float) -> None:
    """Three rows that end at different times: the same text and rounds, the reviews inside them included. A model
    that drafts or reviews for any row is called for all, so that calls are not compared."""
    options = dict(POINTS[case])
    processor = make_processor(options.pop("temperature"))
    ends, batch = Counter[int](), {"length": 24, "gamma": 64, "stop": {7}}
    for seed in range(4):
        together = decode(target(), PROMPTS, three(lenience), KeyedSampler(processor, seed, **options), **batch)
        assert emitted(together, 3) == answers(target(), PROMPTS, None, KeyedSampler(processor, seed), **batch)
        for row, prompt in enumerate(PROMPTS):
            own = Numbered(processor, seed, **options)
            own.number = row
            alone = decode(target(), [prompt], three(lenience), own, **batch)
            assert [uncounted(step) for step in steps(together, row)] == [uncounted(step) for step in steps(alone)]
            ends[len(steps(together, row))] += 1
    assert len(ends) > 2


def uncounted(step: Step) -> Any:
    return step.drafted, step.source, step.path, step.token, [uncounted(inner) for inner in step.inner]


def test_inner_rounds_carry_the_numbers_of_their_rows() -> None:
    """Also when the first row has ended and the others have moved up."""
    run = decode(target(), [[7, 7, 2], [4], [5, 6, 7]], three(), sampler(), length=24, gamma=64, stop={6})
    ended = [max(index for index, event in enumerate(run) if getattr(event, "row", None) == row) for row in range(3)]
    assert len(set(ended)) == 3
    seen = Counter[int]()
    for step in run:
        if isinstance(step, Step):
            assert {inner.row for inner in step.inner} <= {step.row}
            assert {deep.row for inner in step.inner for deep in inner.inner} <= {step.row}
            seen[step.row] += len(step.inner)
    assert all(seen[row] for row in range(3))


def test_drawn_drafts_in_a_batch_have_laws_for_their_own_rows_only() -> None:
    rows = [list(row) for row in PROMPTS]
    drafter = cascade_of([ModelDrafter(base()), LawDrafter(small())], [[3, 0], [0, 2]])
    session = target().open(rows)
    drafter.start(rows, session, session)
    draft = drafter.propose(rows, [4, 0, 2], sampler(1.0).drafting())
    lengths = [sum(token >= 0 for token in row) for row in draft.tokens.tolist()]
    assert lengths[1:] == [0, 2]
    assert lengths[0] >= 3
    assert draft.probs is not None
    for place, length in enumerate(lengths):
        assert draft.probs[place, :length].sum(dim=-1).tolist() == pytest.approx([1.0] * length)


# -- who is passed over ---------------------------------------------------------------------------


def own_points(choose: Any = None) -> PointDrafter:
    points = PointDrafter(V, choose or (lambda row: (row[-1] + 1) % V))
    points.names = ("points",)
    return points


def proposed(drafter: ChainDrafter, rows: Rows, k: list[int], sampling: Sampler | None = None) -> Draft:
    session = target().open(rows)
    drafter.start(rows, session, session)
    return drafter.propose(rows, k, sampling or sampler().drafting())


def sources(drafter: ChainDrafter, draft: Draft) -> list[list[str]]:
    assert draft.source is not None
    return [
        [drafter.names[index] for index, token in zip(whose, tokens, strict=True) if token >= 0]
        for whose, tokens in zip(draft.source.tolist(), draft.tokens.tolist(), strict=True)
    ]


@pytest.mark.parametrize("context", [4, 5])
def test_a_reviewer_whose_context_is_too_short_is_passed_over(context: int) -> None:
    """The prompt fills it, or leaves it: the drafter behind it goes on alone."""
    drafter = cascade_of([ModelDrafter(base(context=context)), own_points()], [[3, 4], [0, 2]])
    draft = proposed(drafter, [[1, 2, 3, 4, 5]], [20])
    assert draft.tokens.tolist() == [[6, 7, 0, 1, 2, 3, 4, 5]]  # two at a time until 3 + 4 are there
    assert sources(drafter, draft) == [["points"] * 8]
    assert draft.calls == ()
    assert draft.trace == ()


def test_a_reviewer_reviews_as_far_as_its_context_goes() -> None:
    """Positions 5 and 6 are free: two tokens of it, then the drafter behind it, up to 3 + 4 and one more."""
    lm = base(context=7)
    drafter = cascade_of([ModelDrafter(lm), own_points(lambda row: 0)], [[3, 4], [0, 2]])
    draft = proposed(drafter, [[1, 2, 3, 4, 5]], [20])
    assert sources(drafter, draft) == [["base", "base", *["points"] * 6]]
    assert draft.tokens[0, :2].tolist() == greedy_answer(lm, [1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize("context", [6, 9, 14])
def test_rows_that_outgrow_a_reviewer_beside_others_that_do_not(context: int) -> None:
    """The toys refuse whatever does not fit them. Each row goes on as it does alone."""

    def cascade() -> ChainDrafter:
        return cascade_of([ModelDrafter(mixed(base(context=context))), own_points()], [[2, 2], [0, 3]])

    prompts = [[1, 2, 3, 4, 5], [4], [2, 3, 4]]
    run = decode(target(), prompts, cascade(), sampler(), length=16, gamma=64)
    reviewed = 0
    for row, prompt in enumerate(prompts):
        alone = decode(target(), [prompt], cascade(), sampler(), length=16, gamma=64)
        assert [uncounted(step) for step in steps(run, row)] == [uncounted(step) for step in steps(alone)]
        reviewed += sum(len(step.inner) for step in steps(run, row))
    assert reviewed > 2


def test_a_silent_leaf_leaves_the_reviewer_its_own_tokens() -> None:
    drafter = cascade_of([ModelDrafter(base()), own_points(lambda row: None)], [[3, 4], [0, 2]])
    draft = proposed(drafter, [[1, 2]], [20])
    assert draft.tokens[0].tolist() == greedy_answer(base(), [1, 2], 3)
    assert sources(drafter, draft) == [["base"] * 3]
    assert [(call.model, call.passes) for call in draft.calls] == [("base", 3)]
    assert [step.drafted for step in draft.trace] == [(), (), ()]


def test_a_leaf_that_says_less_than_it_is_asked_for_is_asked_again() -> None:
    """It knows one token at a time, and nothing behind 7."""
    asked: list[int] = []

    class Terse(PointDrafter):
        def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
            asked.append(k[0])
            return super().propose(rows, [min(want, 1) for want in k], sampler)

    leaf = Terse(V, lambda row: row[-1] + 1 if row[-1] < 7 else None)
    draft = proposed(cascade_of([leaf], [[5]]), [[4]], [9])
    assert draft.tokens.tolist() == [[5, 6, 7]]
    assert asked == [5, 5, 5, 5]


def test_nothing_fits_or_nothing_is_wanted() -> None:
    for k in ([0], [-1]):
        draft = proposed(three(), [[1, 2]], k)
        assert draft.tokens.shape == (1, 0)
        assert draft.calls == ()
    assert proposed(cascade_of([own_points()], [[0]]), [[1]], [9]).tokens.shape == (1, 0)


# -- how long a proposal may be -------------------------------------------------------------------


class Moody:
    """A model that accepts as many of the drafts as `mood(count)` says, then says something else."""

    vocab_size = V

    def __init__(self, name: str, mood: Any, context: int = 1 << 30) -> None:
        self.name, self.mood, self.context = name, mood, context

    def open(self, prompt: Rows, **more: Any) -> Any:
        return self

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        drafted = draft.tokens[0].tolist()
        passing = self.mood(len(drafted))
        said = [token if place < passing else (token + 1) % V for place, token in enumerate([*drafted, 0])]
        return torch.nn.functional.one_hot(torch.tensor([said]), V) * 50.0

    def keep(self, path: Tensor) -> None:
        return None


def longest(matrix: list[list[int]], seeds: int, silence: bool = False) -> tuple[int, int]:
    """The longest proposal found, and the most that is told."""
    found = told = 0
    for seed in range(seeds):
        noise = random.Random(seed)
        mood = lambda count, noise=noise: noise.choice((count, count, max(0, count - 1), 0))  # noqa: E731

        class Leaf(PointDrafter):
            def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
                return super().propose(rows, [mood(want) if silence else max(1, mood(want)) for want in k], sampler)  # noqa: B023

        size = len(matrix)
        context = noise.randint(1, 12) if silence else 1 << 30
        models = [Moody(f"model {place}", mood, context if place == 0 else 1 << 30) for place in range(size - 1)]
        drafter = cascade_of([*models, Leaf(V, lambda row: 0)], matrix)
        told = drafter.most
        draft = proposed(drafter, [[1]], [10_000])
        found = max(found, draft.tokens.shape[1])
    return found, told


ENTRY = st.integers(0, 3)
MATRICES = st.integers(1, 3).flatmap(
    lambda size: st.tuples(*[st.tuples(*[ENTRY if c >= r else st.just(0) for c in range(size)]) for r in range(size)])
)


@settings(max_examples=50, deadline=None)
@given(matrix=MATRICES)
def test_no_proposal_is_longer_than_what_is_told(matrix: Any) -> None:
    for silence in (False, True):
        found, told = longest([list(row) for row in matrix], 6, silence)
        assert found <= told


@pytest.mark.parametrize(
    ("matrix", "most"),
    [
        ([[4]], 7),  # 3 and then 4 more
        ([[1]], 1),
        ([[2, 0], [0, 2]], 1 + 4),  # one, then all of 3 and its own
        ([[2, 1], [0, 2]], 1 + 4),
        ([[1, 2], [0, 1]], 3),  # 1 + 1 + 1 or, at once, 2 and 1
        ([[1, 1], [0, 3]], 6),  # 2 + 3 and its own
        ([[2, 2], [0, 3]], 1 + 6),  # one, then 5 and its own; 3 + 3 is less
        ([[5, 1], [0, 3]], 4 + 6),  # 5 + 3 is less
        ([[1, 1, 1], [0, 1, 1], [0, 0, 1]], 3),  # small's 2 and base's own
        ([[1, 4, 1], [0, 1, 1], [0, 0, 2]], 4 + 4),  # behind 4 small's own and the 3 that may come of 2 and 2
    ],
)
def test_the_longest_proposal_is_as_long_as_told(matrix: list[list[int]], most: int) -> None:
    assert longest(matrix, 150) == (most, most)


def test_a_first_part_that_brings_little_leaves_the_second_room_for_more() -> None:
    """The first may bring 2 or 3; only behind 2 the second is asked, for its 9."""
    drafter = cascade_of([Moody("model", lambda count: 0), own_points()], [[2, 1], [0, 9]])
    assert proposed(drafter, [[1]], [10_000]).tokens.shape[1] == 2 + 9
    assert drafter.most >= 2 + 9


# -- members --------------------------------------------------------------------------------------


class Ear(PointDrafter):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(V, lambda row: (row[-1] + 1) % V)
        self.names, self.heard = ("ear",), list[str]()

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self.heard.append("start")
        self.targets = (target, verifier)
        super().start(prompt, target, verifier)

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        self.heard.append("observe")

    def select(self, rows: Tensor) -> None:
        self.heard.append("select")
        super().select(rows)


def test_a_member_used_in_three_places_is_told_once() -> None:
    ear, lms = Ear(), (base(), small())
    drafter = cascade_of([*map(ModelDrafter, lms), ear], [[1, 1, 1], [0, 1, 1], [0, 0, 1]])
    assert drafter.names == ("base", "small", "ear")
    assert [type(member) for member in drafter.members] == [Reviewer, Reviewer, Ear]
    rows = [[1, 2], [3, 4]]
    session = target().open(rows)
    drafter.start(rows, session, session)
    assert ear.targets == (session, session)
    assert [helper.lm for helper in drafter.sessions] == list(lms)  # type: ignore[attr-defined]
    draft = drafter.propose(rows, [6, 6], sampler().drafting())
    empty = torch.empty((2, 0), dtype=torch.long)
    drafter.observe(rows, draft, Verdict(empty, torch.tensor([1, 1]), torch.empty(2, 1, V), torch.empty(2, 1, V)))
    drafter.select(torch.tensor([1]))
    assert ear.heard == ["start", "observe", "select"]
    assert [helper.cached[0][:2] for helper in drafter.sessions] == [[3, 4]] * 2  # type: ignore[attr-defined]
    assert ear.ids == [1]


def test_a_reviewer_used_in_two_places_has_one_cache() -> None:
    """Small reviews under base and beside it: no token is read twice."""
    lms = [chain_lm(V, [1], [2, 3, 4, 5, 6, 7, 0] * 4, name) for name in ("target", "base", "small")]
    drafter = cascade_of([*map(ModelDrafter, lms[1:]), own_points()], [[2, 4, 0], [0, 1, 0], [0, 0, 2]])
    decode(lms[0], [[1]], drafter, sampler(), length=24, gamma=drafter.most)
    for lm in lms[1:]:
        assert lm.fed <= 24 + lm.passes, "tokens were read again"


def test_hidden_states_are_asked_for_where_a_member_reads_them() -> None:
    student = make_student("feature", make_target(V), seed=6)
    assert cascade_of([ModelDrafter(base()), FeatureDrafter(student)], [[1, 0], [0, 1]]).needs_hidden
    assert chain_of([ModelDrafter(base()), FeatureDrafter(student)], [1, 1]).needs_hidden
    assert not three().needs_hidden


def test_names_are_told_once_and_in_their_order() -> None:
    assert three().names == ("base", "small", "maxgram", "bigram")
    assert chain_of([own_points(), ModelDrafter(small()), own_points()], [1, 1, 1]).names == ("points", "small")


# -- what is no cascade ---------------------------------------------------------------------------


def refusal(drafters: list[Any], matrix: Any, lenience: Any = 1.0) -> str:
    with pytest.raises(UserError) as caught:
        cascade_of(drafters, matrix, lenience)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_models_review() -> None:
    line = " is no model and cannot review drafts: only the last drafter of a cascade may be one"
    two = [[1, 1], [0, 1]]
    assert refusal([MaxGramDrafter(), ModelDrafter(base())], two) == "maxgram" + line
    assert refusal([NgramDrafter(V), own_points()], two) == "ngram" + line
    assert refusal([TablesDrafter(None), own_points()], two) == "match" + line
    assert refusal([three(), own_points()], two) == "base" + line
    assert refusal([object(), own_points()], two) == "object" + line
    feature = FeatureDrafter(make_student("feature", make_target(V), seed=6))
    told = "feature cannot review drafts (it has no states but its target's): only the last can be one"
    assert refusal([feature, own_points()], two) == told
    assert refusal([ModelDrafter(base()), feature, own_points()], [[1, 1, 1], [0, 1, 1], [0, 0, 1]]) == told


def test_what_does_not_fit_is_refused() -> None:
    two = [ModelDrafter(base()), own_points()]
    assert refusal([], [[1]]) == "a cascade needs at least one drafter"
    assert refusal(two, [[1]]) == "k_matrix must have a row for each of the 2 drafters, got 1"
    assert refusal(two, [[1, 1], [1, 1]]) == "k_matrix must be upper triangular: row 2, column 1 must be 0, got 1"
    assert refusal(two, [[1, 1], [0, 1]], 0.5) == "lenience must be a number, at least 1, got 0.5"
    for drafters, amounts, line in (
        ([], [], "a chain needs an amount for each of its drafters, got 0 for 0"),
        (two, [1], "a chain needs an amount for each of its drafters, got 1 for 2"),
        (two, [1, -1], "the amounts of a chain must be 0 or more, got -1"),
    ):
        with pytest.raises(UserError, match=f"^{line}$"):
            chain_of(drafters, amounts)


# -- greedy ---------------------------------------------------------------------------------------


def test_a_reviewer_passes_its_own_chances_up() -> None:
    """At temperature 1, of accepted tokens and of its own."""
    lm = base()
    drafter = cascade_of([ModelDrafter(lm), own_points()], [[4, 0], [0, 3]], 2.0)
    for sampling in (sampler(), sampler(0.5, coupling="gumbel"), sampler(0.5)):
        draft = proposed(drafter, [[1, 2]], [20], sampling.drafting())
        row, assured = [1, 2], []
        for token in draft.tokens[0].tolist():
            assured.append(float(lm.logits([row])[0].softmax(dim=-1)[token]))
            row.append(token)
        assert draft.raw is not None
        assert draft.raw[0].tolist() == pytest.approx(assured, abs=1e-6)
        assert (draft.probs is None) == sampling.point_mass


@pytest.mark.parametrize("lenience", [1.0, 1.5, 2.0, 3.0, 5.0])
def test_greedy_text_is_plain_decodings_for_every_lenience(lenience: float) -> None:
    accepted = Counter[str]()
    drafter = three(lenience)
    for prompt in ([1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 5, 6], [0, 0, 0, 1]):
        for length in (1, 2, 3, 30):
            run = decode(target(), [prompt], drafter, sampler(), length=length, gamma=drafter.most)
            assert emitted(run)[0] == greedy_answer(target(), prompt, length)
            for step in steps(run):
                accepted.update(drafter.names[step.source[node]] for node in step.path)
    assert set(accepted) == {"base", "small", "maxgram"}


def test_lenience_lets_more_drafts_pass_between_the_drafters() -> None:
    def share(lenience: float) -> float:
        drafter, passed, seen = three(lenience), 0, 0
        for prompt in ([1, 2, 3], [4]):
            for step in steps(decode(target(), [prompt], drafter, sampler(), length=30, gamma=64)):
                passed += sum(len(inner.path) for inner in step.inner)
                seen += sum(len(inner.path) + len(inner.rejected) for inner in step.inner)
        return passed / seen

    assert share(5.0) > share(2.0) + 0.02 > share(1.0) + 0.1


def test_a_stop_token_in_a_draft_ends_the_answer_there() -> None:
    lm = ToyLM(V, lambda prefix: [30.0 * (token == len(prefix) % V) for token in range(V)], "target")
    drafter = cascade_of([ModelDrafter(lm), own_points()], [[6, 2], [0, 3]])
    for stop in range(V):
        run = decode(lm, [[0]], drafter, sampler(), length=20, gamma=drafter.most, stop={stop})
        assert emitted(run)[0] == [*range(1, stop + 1)] if stop else [*range(1, V), 0]
