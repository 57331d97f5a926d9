"""Who is called when in a cascade of three, call by call: K = [[5,14,10],[0,1,10],[0,0,10]] worked out by hand.

All parts are scripted: the token at position n of the text is n. A part that errs at a position says something else
there, whatever stands before. 0 is what the stand-in for max-gram says where it errs, 63 what a model says.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sampling.cascades import cascade_of, chain_of
from sampling.drafters import ModelDrafter
from sampling.drafters.chain import ChainDrafter
from sampling.events import Step
from sampling.sampler import KeyedSampler
from sampling.swi import Model, costs_of, swi
from sampling.types import Draft, Rows, Sampler
from tests.runs import decode, emitted, steps
from tests.toy_drafters import PointDrafter
from tests.toys import PEAK, ToyLM, ToySession
from utils.logits_processors import make_processor

V = 64
WRONG = 63
K = [[5, 14, 10], [0, 1, 10], [0, 0, 10]]
Log = list[tuple[str, int, int]]


class Listening(ToyLM):
    """A scripted model that writes down each of its calls: its name, the length of the row, the drafts it examines."""

    def __init__(self, name: str, log: Log, errs: set[int]) -> None:
        def logits_of(prefix: tuple[int, ...]) -> list[float]:
            said = WRONG if len(prefix) in errs else len(prefix) % V
            return [PEAK * (token == said) for token in range(V)]

        super().__init__(V, logits_of, name)
        self.log = log

    def open(self, prompt: Rows, **more: Any) -> ToySession:
        session = super().open(prompt, **more)
        score = session.score

        def listened(rows: Rows, draft: Draft) -> torch.Tensor:
            self.log.append((self.name, len(rows[0]), draft.tokens.shape[1]))
            return score(rows, draft)

        session.score = listened  # type: ignore[method-assign]
        return session


class MaxGram(PointDrafter):
    """Stands in for max-gram: writes down the length of the row and how many tokens it is asked for."""

    names = ("maxgram",)

    def __init__(self, log: Log, errs: set[int], most: int = V) -> None:
        super().__init__(V, lambda row: 0 if len(row) in errs else len(row) % V)
        self.log, self.most = log, most

    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft:
        self.log.append(("maxgram", len(rows[0]), k[0]))
        return super().propose(rows, [min(want, self.most) for want in k], sampler)


class World:
    """Target, base, small and max-gram's stand-in, with the positions at which each errs, and what happened."""

    def __init__(self, base: set[int], small: set[int], maxgram: set[int], k: list[list[int]] = K) -> None:
        self.log: Log = []
        self.target = Listening("target", self.log, set())
        self.base, self.small = Listening("base", self.log, base), Listening("small", self.log, small)
        leaf = MaxGram(self.log, maxgram)
        self.drafter = cascade_of([ModelDrafter(self.base), ModelDrafter(self.small), leaf], k)

    def run(self, length: int) -> list[Step]:
        """The rounds behind the opening one; `log` holds their calls."""
        greedy = KeyedSampler(make_processor(0.0))
        events = decode(self.target, [[0]], self.drafter, greedy, length=length, gamma=self.drafter.most)
        assert emitted(events)[0] == list(range(1, length + 1))
        assert self.log.pop(0) == ("target", 1, 0)
        return steps(events)[1:]


ALL_ACCEPTED = [  # 60 tokens behind a prompt of one; the opening round brings the first: the row holds 2
    # round 1: room for 38 drafts, the most that K can bring
    ("maxgram", 2, 10),  # small is to bring 1 or more: max-gram's 10 first
    ("small", 2, 10),  #   all pass, and one of its own: 11
    ("base", 2, 11),  #   11 tokens are there, so max-gram need not fill up to 1 + 10. All pass: 12
    ("maxgram", 14, 10),  # 5 or more are there; 5 + 14 are not
    ("small", 14, 10),  #   11 more: 23
    ("maxgram", 25, 10),  # 5 + 14 + 10 = 29 are not there: 10 more without a review, 33
    ("target", 2, 33),  # and one of its own: the row holds 36
    # round 2: 61 − 36 − 1 = 24 drafts are left
    ("maxgram", 36, 10),
    ("small", 36, 10),
    ("base", 36, 11),  # 12
    ("maxgram", 48, 10),
    ("small", 48, 10),  # 23 of at least 19
    ("maxgram", 59, 1),  # 29 do not fit any more: one is left
    ("target", 36, 24),  # 24 and one of its own: 61
]


def test_everything_is_accepted() -> None:
    world = World(set(), set(), set())
    run = world.run(60)
    assert world.log == ALL_ACCEPTED
    assert [len(step.path) for step in run] == [33, 24]


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


def partly() -> tuple[World, list[Step]]:
    world = World(base={11}, small={29}, maxgram={5, 11, 17})
    return world, world.run(30)


def test_reviewers_accept_some_of_it() -> None:
    world, run = partly()
    assert world.log == PARTLY_ACCEPTED
    assert [len(step.path) for step in run] == [9, 17, 0]
    assert [step.token for step in run] == [11, 29, 30]
    assert run[0].drafted == (*range(2, 11), WRONG, *range(12, 30))
    assert run[1].drafted == (*range(12, 29), WRONG)


def test_a_token_keeps_the_name_of_who_brought_it() -> None:
    world, run = partly()
    assert world.drafter.names == SOURCES
    m, s, b = "maxgram", "small", "base"
    first = [m, m, m, s, *[m] * 5, b, *[m] * 5, s, *[m] * 10, s, m]  # positions 2 … 29
    assert [SOURCES[index] for index in run[0].source] == first
    second = [*[m] * 5, s, *[m] * 10, b, s]  # positions 12 … 29
    assert [SOURCES[index] for index in run[1].source] == second


def passes(step: Step) -> dict[str, int]:
    counted = Counter(call.model for call in step.calls)
    assert max(counted.values()) == 1, "one call a model"
    return {call.model: call.passes for call in step.calls}


def test_calls_add_up_over_all_models_and_levels() -> None:
    _, run = partly()
    assert [passes(step) for step in run] == [
        {"base": 1, "small": 3, "target": 1},
        {"base": 1, "small": 2, "target": 1},
        {"target": 1},
    ]
    for step in run:
        assert step.calls[-1].model == "target"
        assert all(call.seconds > 0 for call in step.calls)
        reviews = Counter[str]()
        for inner in step.inner:
            reviews.update(passes(inner))
        assert reviews == Counter({name: count for name, count in passes(step).items() if name != "target"})


Shape = tuple[str, tuple[int, ...], tuple[int, ...], int, list[Any]]


def shape(step: Step) -> Shape:
    """Who reviewed, what was drafted, which passed, its own token, and the reviews below."""
    return (step.calls[-1].model, step.drafted, step.accepted, step.token or 0, [shape(one) for one in step.inner])


def test_each_review_is_a_nested_round_where_it_happened() -> None:
    _, run = partly()
    small_in_base: Shape = ("small", (2, 3, 4, 0, 6, 7, 8, 9, 10, 0), (2, 3, 4), 5, [])
    drafted = (2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 12, 13, 14, 15)
    assert [shape(one) for one in run[0].inner] == [
        ("base", drafted, tuple(range(2, 11)), WRONG, [small_in_base]),
        ("small", (12, 13, 14, 15, 16, 0, 18, 19, 20, 21), (12, 13, 14, 15, 16), 17, []),
        ("small", tuple(range(18, 28)), tuple(range(18, 28)), 28, []),
    ]
    assert [shape(one) for one in run[1].inner] == [
        ("base", tuple(range(12, 28)), tuple(range(12, 28)), 28, [shape(run[1].inner[0].inner[0])]),
        ("small", (), (), WRONG, []),
    ]
    assert run[2].inner == ()
    base = run[0].inner[0]
    assert [SOURCES[index] for index in base.source] == [*["maxgram"] * 3, "small", *["maxgram"] * 10]
    assert base.rejected == (9,)
    assert base.discarded == (10, 11, 12, 13)
    assert [(call.model, call.passes) for call in base.calls] == [("small", 1), ("base", 1)]
    assert [(call.model, call.passes) for call in base.inner[0].calls] == [("small", 1)]
    assert base.draft_p[4:] == pytest.approx([1] * 6)  # of max-gram's tokens; small's own first ones are small's
    assert base.target_p[-1] == pytest.approx(0, abs=1e-6)


MODELS = {
    "target": Model("google/flan-t5-xxl"),
    "base": Model("google/flan-t5-base"),
    "small": Model("google/flan-t5-small"),
}


@pytest.mark.parametrize(
    ("table", "all_accepted", "partly_accepted"),
    [
        # 59·11300 / (2·11300 + 2·220 + 4·60) and 29·11300 / (3·11300 + 2·220 + 5·60)
        ("model_parameters", 666_700 / 23_280, 327_700 / 34_640),
        # 59 / (2 + 2·0.04 + 4·0.02) and 29 / (3 + 2·0.04 + 5·0.02)
        ("previous_work", 59 / 2.16, 29 / 3.18),
    ],
)
def test_the_standardised_walltime_improvement_of_those_calls(
    table: str, all_accepted: float, partly_accepted: float
) -> None:
    """Max-gram costs nothing; the opening round's token and call do not count."""
    runs = [World(set(), set(), set()).run(60), partly()[1]]
    costs = costs_of(table, MODELS)
    for run, expected in zip(runs, (all_accepted, partly_accepted), strict=True):
        calls = Counter[str]()
        for step in run:
            calls.update(passes(step))
        tokens = sum(len(step.emitted) for step in run)
        assert swi(tokens, calls, costs) == pytest.approx(expected)


def test_max_gram_is_asked_for_ks_last_entry_wherever_it_stands() -> None:
    """Four at a time, under each reviewer and alone, until what K asks for is there or nothing more fits."""
    world = World(set(), set(), set(), [[2, 3, 7], [0, 1, 6], [0, 0, 4]])
    world.run(40)
    assert world.log[:11] == [
        ("maxgram", 2, 4),
        ("small", 2, 4),  # 5
        ("maxgram", 7, 4),  # base's 1 + 6 are not there: 4 more
        ("base", 2, 9),  # 10, more than 2 and than 2 + 3: small need not draft
        ("maxgram", 12, 4),  # 2 + 3 + 7 are not there: 14
        ("target", 2, 14),
        ("maxgram", 17, 4),
        ("small", 17, 4),
        ("maxgram", 22, 4),
        ("base", 17, 9),
        ("maxgram", 27, 4),
    ]


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
    assert drafter.most == 7
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
    """The calls of a run behind its opening round."""
    greedy = KeyedSampler(make_processor(0.0))
    decode(target, [[0]], drafter, greedy, length=length, gamma=drafter.most)
    return log[1:]
