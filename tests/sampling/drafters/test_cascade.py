"""Cascades as drafters: batches, reviewers that are passed over, who is called when.
That the output is the target's is proved in tests/sampling/drafters/test_cascade_exact.py; a review by hand is in
tests/sampling/verify/test_review.py; what is no cascade in tests/sampling/test_library_calls.py.

Who is called when in a cascade of three, call by call: K = [[5,14,10],[0,1,10],[0,0,10]] worked out by hand. All its
parts are scripted: the token at position n of the text is n. A part that errs at a position says something else there,
whatever stands before. 0 is what the stand-in for max-gram says where it errs, 63 what a model says.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.drafters.cascade import ChainDrafter, cascade_of, chain_of
from sampling.drafters.draft_heads.eagle import FeatureDrafter
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Step
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, Rows, Sampler
from tests.support.reference import greedy_answer
from tests.support.refusals import refused
from tests.support.runs import answers, decode, drafting, emitted, sampler, steps
from tests.support.students import make_student, make_target
from tests.support.toys import PEAK, PointDrafter, TableLM, ToyLM, ToySession, chain_lm
from utils.logits_processors import make_processor

V = 8
VOCAB = 64
WRONG = 63
Log = list[tuple[str, int, int]]


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


# -- who is passed over ---------------------------------------------------------------------------


def own_points(choose: Any = None) -> PointDrafter:
    points = PointDrafter(V, choose or (lambda row: (row[-1] + 1) % V))
    points.traits = replace(points.traits, names=("points",))
    return points


def proposed(drafter: ChainDrafter, rows: Rows, k: list[int], sampling: Sampler | None = None) -> Draft:
    session = target().open(rows)
    drafter.start(rows, session, session)
    return drafter.propose(rows, Budget(k), drafting(sampling or sampler(), rows))


@pytest.mark.parametrize("context", [4, 5])
def test_a_reviewer_whose_context_is_too_short_is_passed_over(context: int) -> None:
    """The prompt fills it, or leaves it: the drafter behind it goes on alone."""
    draft = proposed(
        cascade_of([ModelDrafter(base(context=context)), own_points()], [[3, 4], [0, 2]]), [[1, 2, 3, 4, 5]], [20]
    )
    assert draft.tokens == [[6, 7, 0, 1, 2, 3, 4, 5]]  # two at a time until 3 + 4 are there
    assert draft.calls == ()


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


# -- members --------------------------------------------------------------------------------------


def test_a_reviewer_used_in_two_places_has_one_cache() -> None:
    """Small reviews under base and beside it: no token is read twice."""
    lms = [chain_lm(V, [1], [2, 3, 4, 5, 6, 7, 0] * 4, name) for name in ("target", "base", "small")]
    drafter = cascade_of([*map(ModelDrafter, lms[1:]), own_points()], [[2, 4, 0], [0, 1, 0], [0, 0, 2]])
    decode(lms[0], [[1]], drafter, sampler(), length=24, gamma=drafter.traits.most)
    for lm in lms[1:]:
        assert lm.fed <= 24 + lm.passes, "tokens were read again"


# -- what is no cascade ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ngram", "match", "base", "feature"])
def test_only_models_with_states_of_their_own_review(name: str) -> None:
    why = " is no model and cannot review drafts: only the last drafter of a cascade may be one"
    if name == "feature":
        why = " cannot review drafts (it has no states but its target's): only the last can be one"
    feature = FeatureDrafter(make_student("feature", make_target(V), seed=6))
    reviewer = {"ngram": NgramDrafter(V), "match": LookupDrafter(), "base": three(), "feature": feature}[name]
    assert refused(cascade_of, [reviewer, own_points()], [[1, 1], [0, 1]]) == name + why


# -- greedy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lenience", [1.0, 1.5, 2.0, 3.0, 5.0])
def test_greedy_text_is_plain_decodings_for_every_lenience(lenience: float) -> None:
    accepted = Counter[str]()
    drafter = three(lenience)
    for prompt in ([1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 5, 6], [0, 0, 0, 1]):
        for length in (1, 2, 3, 30):
            run = decode(target(), [prompt], drafter, sampler(), length=length, gamma=drafter.traits.most)
            assert emitted(run)[0] == greedy_answer(target(), prompt, length)
            for step in steps(run):
                accepted.update(drafter.traits.names[step.source[node]] for node in step.path)
    assert set(accepted) == {"base", "small", "maxgram"}


# -- who is called when ----------------------------------------------------------------------------


class Listening(ToyLM):
    """A scripted model that writes down each of its calls: its name, the length of the row, the drafts it examines."""

    def __init__(self, name: str, log: Log, errs: set[int]) -> None:
        def logits_of(prefix: tuple[int, ...]) -> list[float]:
            said = WRONG if len(prefix) in errs else len(prefix) % VOCAB
            return [PEAK * (token == said) for token in range(VOCAB)]

        super().__init__(VOCAB, logits_of, name)
        self.log = log

    def open(self, prompt: Rows, **more: Any) -> ToySession:
        session = super().open(prompt, **more)
        score = session.score

        def listened(rows: Rows, draft: Draft) -> torch.Tensor:
            self.log.append((self.name, len(rows[0]), draft.width))
            return score(rows, draft)

        session.score = listened  # type: ignore[method-assign]
        return session


class MaxGram(PointDrafter):
    """Stands in for max-gram: writes down the length of the row and how many tokens it is asked for."""

    traits = replace(PointDrafter.traits, names=("maxgram",))

    def __init__(self, log: Log, errs: set[int], most: int = VOCAB) -> None:
        super().__init__(VOCAB, lambda row: 0 if len(row) in errs else len(row) % VOCAB)
        self.log, self.most = log, most

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        self.log.append(("maxgram", len(rows[0]), budget.max_depth[0]))
        return super().propose(rows, Budget([min(want, self.most) for want in budget.max_depth]), sampler)


# Max-gram errs at 5, 11 and 17, base at 11, small at 29; 30 tokens.
PARTLY_ACCEPTED = [
    # round 1: the row holds 2, 31 − 2 − 1 = 28 drafts fit
    ("maxgram", 2, 10),  # positions 2 … 11
    ("small", 2, 10),  #   2 3 4 pass, 5 is small's own: 4 tokens, at least 1 was asked for
    ("maxgram", 6, 10),  #   11 are not there: max-gram adds 10 behind small's 4, positions 6 … 15
    ("base", 2, 14),  #   2 … 10 pass; at 11 it says 63 where max-gram said 0: 10 tokens
    ("maxgram", 12, 10),  # small is to bring them up to 19
    ("small", 12, 10),  #   12 … 16 pass, 17 is its own: 16 tokens
    ("maxgram", 18, 10),  # not enough: again
    ("small", 18, 10),  #   all pass, 28 is its own: 27 tokens
    ("maxgram", 29, 1),  # up to 29, but only 28 fit
    ("target", 2, 28),  # 2 … 10 pass, at 11 it refuses base's 63: the row holds 12
    # round 2: 31 − 12 − 1 = 18 drafts fit
    ("maxgram", 12, 10),
    ("small", 12, 10),  #   6 tokens: 12 … 17
    ("maxgram", 18, 10),  #   10 raw ones behind them: 18 … 27
    ("base", 12, 16),  #   all pass, 28 is its own: 17 tokens
    ("small", 29, 0),  # room for one token: its own, nothing to review. It errs at 29
    ("target", 12, 18),  # 12 … 28 pass, at 29 it refuses small's 63: the row holds 30
    # round 3: room for the target's own token alone
    ("target", 30, 0),
]
SOURCES = ("base", "small", "maxgram")


def partly() -> tuple[Log, list[Step]]:
    """The calls and the rounds after the opening one."""
    log: Log = []
    models = [ModelDrafter(Listening(name, log, errs)) for name, errs in (("base", {11}), ("small", {29}))]
    drafter = cascade_of([*models, MaxGram(log, {5, 11, 17})], [[5, 14, 10], [0, 1, 10], [0, 0, 10]])
    assert drafter.traits.names == SOURCES
    events = decode(Listening("target", log, set()), [[0]], drafter, sampler(), length=30, gamma=drafter.traits.most)
    assert emitted(events)[0] == list(range(1, 31))
    return log[1:], steps(events)[1:]


def test_reviewers_accept_some_of_it() -> None:
    log, run = partly()
    assert log == PARTLY_ACCEPTED
    assert [len(step.path) for step in run] == [9, 17, 0]
    assert [step.token for step in run] == [11, 29, 30]
    assert (run[0].drafted, run[1].drafted) == ((*range(2, 11), WRONG, *range(12, 30)), (*range(12, 29), WRONG))


def test_a_token_keeps_the_name_of_who_brought_it() -> None:
    _, run = partly()
    m, s, b = "maxgram", "small", "base"
    first = [m, m, m, s, *[m] * 5, b, *[m] * 5, s, *[m] * 10, s, m]  # positions 2 … 29
    assert [SOURCES[index] for index in run[0].source] == first
    assert [SOURCES[index] for index in run[1].source] == [*[m] * 5, s, *[m] * 10, b, s]  # positions 12 … 29


def test_calls_add_up_over_all_models_and_levels() -> None:
    _, run = partly()
    assert [[call[:2] for call in step.calls] for step in run] == [
        [("small", 3), ("base", 1), ("target", 1)],
        [("small", 2), ("base", 1), ("target", 1)],
        [("target", 1)],
    ]


def shape(step: Step) -> tuple[Any, ...]:
    """The reviewer, its drafts, the accepted ones, its own token, and the reviews below."""
    return (step.calls[-1].model, step.drafted, step.accepted, step.token, [shape(inner) for inner in step.inner])


def test_each_review_is_a_nested_round_where_it_happened() -> None:
    _, run = partly()
    small_in_base = ("small", (2, 3, 4, 0, 6, 7, 8, 9, 10, 0), (2, 3, 4), 5, [])
    drafted = (2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 12, 13, 14, 15)
    assert [shape(review) for review in run[0].inner] == [
        ("base", drafted, tuple(range(2, 11)), WRONG, [small_in_base]),
        ("small", (12, 13, 14, 15, 16, 0, 18, 19, 20, 21), (12, 13, 14, 15, 16), 17, []),
        ("small", tuple(range(18, 28)), tuple(range(18, 28)), 28, []),
    ]
    assert [shape(review) for review in run[1].inner] == [
        ("base", tuple(range(12, 28)), tuple(range(12, 28)), 28, [shape(run[1].inner[0].inner[0])]),
        ("small", (), (), WRONG, []),
    ]
    assert run[2].inner == ()


def test_a_model_in_the_last_place_is_asked_for_what_is_missing() -> None:
    log: Log = []
    target, base, small = (Listening(name, log, set()) for name in ("target", "base", "small"))
    drafter = cascade_of([ModelDrafter(base), ModelDrafter(small)], [[3, 2], [0, 4]])
    assert played(target, drafter, 12, log) == [
        *[("small", place, 0) for place in (2, 3, 4, 5)],  # 4 one-token passes
        ("base", 2, 4),  # 5 tokens: 3 and 3 + 2 are there
        ("target", 2, 5),
        ("small", 8, 0),  # 13 − 8 − 1 = 4 fit: 3 of small and base's own
        ("small", 9, 0),
        ("small", 10, 0),
        ("base", 8, 3),
        ("target", 8, 4),
    ]


def test_a_chain_without_reviews_asks_each_part_for_its_share() -> None:
    log: Log = []
    target, small = Listening("target", log, set()), Listening("small", log, set())
    drafter = chain_of([ModelDrafter(small), MaxGram(log, set(), most=2)], [2, 5])
    assert drafter.traits.most == 7
    assert played(target, drafter, 10, log) == [
        ("small", 2, 0),
        ("small", 3, 0),
        ("maxgram", 4, 5),  # it has 2 at a time
        ("maxgram", 6, 3),
        ("maxgram", 8, 1),
        ("target", 2, 7),
        ("target", 10, 0),  # 11 − 10 − 1 = 0 fit
    ]


def played(target: Listening, drafter: ChainDrafter, length: int, log: Log) -> Log:
    """The calls of a run after its opening round."""
    decode(target, [[0]], drafter, sampler(), length=length, gamma=drafter.traits.most)
    return log[1:]
