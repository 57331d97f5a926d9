"""One drafter where it speaks, another where it does not: who drafts which row, and with which law."""

from __future__ import annotations

import pytest
import torch

from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.fallback import FallbackDrafter
from sampling.events import Call, Step
from sampling.gamma.controller import Controller
from sampling.types import Budget, Draft, Sampler, Verdict
from tests.support.runs import drafting, sampler
from tests.support.toy_drafters import PointDrafter
from tests.support.toys import ALONE, TableLM

V = 5


def first_row_only() -> PointDrafter:
    return PointDrafter(V, lambda row: 3 if row[0] == 0 else None)


def started(rows: list[list[int]]) -> FallbackDrafter:
    drafter = FallbackDrafter(first_row_only(), ModelDrafter(TableLM(V, seed=3)))
    session = TableLM(V, seed=1).open(rows)
    drafter.start(rows, session, session)
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_second_is_not_asked_where_the_first_speaks(temperature: float) -> None:
    draft = started([[0, 1]]).propose([[0, 1]], Budget([3]), drafting(sampler(temperature, 7), [[0, 1]]))
    assert draft.tokens.tolist() == [[3, 3, 3]]
    assert draft.calls == ()


def test_the_second_drafts_alone_where_the_first_is_silent() -> None:
    rows = [[1, 2]]
    drafter = started(rows)
    draft = drafter.propose(rows, Budget([3]), drafting(sampler(1.0, 7), rows))
    alone = ModelDrafter(TableLM(V, seed=3))
    alone.start(rows, drafter.then.session, drafter.then.session)  # type: ignore[attr-defined]  # any session will do
    expected = alone.propose(rows, Budget([3]), drafting(sampler(1.0, 7), rows))
    assert torch.equal(draft.tokens, expected.tokens)
    assert torch.equal(draft.probs, expected.probs)  # type: ignore[arg-type]
    assert draft.source is not None
    assert draft.source.tolist() == [[1, 1, 1]]
    assert len(drafter.traits.names) == 2
    assert [call.passes for call in draft.calls] == [3]


def test_rows_of_one_batch_are_drafted_by_either_and_each_keeps_its_law() -> None:
    rows = [[0, 1], [1, 2], [0, 4]]
    draft = started(rows).propose(rows, Budget([2, 3, 1]), drafting(sampler(1.0, 7), rows))
    assert draft.tokens[0].tolist() == [3, 3, -1]
    assert draft.tokens[2].tolist() == [3, -1, -1]
    assert (draft.tokens[1] >= 0).all()
    assert draft.source is not None
    assert draft.source[1].tolist() == [1, 1, 1]
    assert draft.source[0, 0] == 0
    assert draft.probs is not None
    assert draft.probs[0, 0].tolist() == [0, 0, 0, 1, 0]
    assert draft.probs[1].sum(dim=-1).tolist() == pytest.approx([1, 1, 1])
    assert draft.draft_prob is not None
    assert draft.draft_prob[0, 0] == 1
    assert draft.draft_prob[1, 0] < 1


def test_a_row_that_may_not_draft_gets_nothing() -> None:
    rows = [[0, 1], [1, 2]]
    draft = started(rows).propose(rows, Budget([2, 0]), drafting(sampler(0.0, 7), rows))
    assert draft.tokens.tolist() == [[3, 3], [-1, -1]]


def test_both_hear_of_every_round_and_follow_the_rows() -> None:
    heard: list[str] = []

    class Ear(PointDrafter):
        def observe(self, rows: list[list[int]], draft: Draft, verdict: Verdict) -> None:
            heard.append("observe")

        def select(self, rows: torch.Tensor) -> None:
            heard.append("select")

    ears = FallbackDrafter(Ear(V, lambda row: None), Ear(V, lambda row: 1))
    nothing = torch.empty((1, 0), dtype=torch.long)
    ears.observe([[0]], Draft.empty(1), Verdict(nothing, torch.tensor([1]), torch.empty(1, 1, V), torch.empty(1, 1, V)))
    ears.select(torch.tensor([0]))
    assert heard == ["observe", "observe", "select", "select"]


# -- under `gamma auto` ---------------------------------------------------------------------------


def test_a_chain_ends_behind_the_token_that_makes_it_unlikely() -> None:
    """The token stays; the next one is not drawn. Each row for itself."""
    rows = [[0, 1], [1, 2], [2, 3]]
    session = TableLM(V, seed=1).open(rows)
    whole, cut = (ModelDrafter(TableLM(V, seed=3, sharpness=2.0), least) for least in (0.0, 0.4))
    for drafter in (whole, cut):
        drafter.start(rows, session, session)
    long, short = (
        drafter.propose(rows, Budget([4, 4, 4]), drafting(sampler(0.0, 7), rows)) for drafter in (whole, cut)
    )
    assert long.draft_prob is not None
    lengths = []
    for row in range(3):
        chances = long.draft_prob[row].cumprod(dim=0).tolist()
        length = next((place for place, chance in enumerate(chances, start=1) if chance < 0.4), 4)
        kept = [token for token in short.tokens[row].tolist() if token >= 0]
        assert kept == long.tokens[row, :length].tolist()
        lengths.append(length)
    assert len(set(lengths)) > 1, "the rows are to end at different places"
    assert short.calls[0].passes == short.tokens.shape[1] == max(lengths)


def rounds(pace: Controller, count: int, calls: bool, accepted: int, seconds: float) -> None:
    """So many rounds of a drafter that ran its model or did not; a pass of the target takes a second."""
    for _ in range(count):
        gamma = pace.budget([0]).max_depth[0]
        path = tuple(range(min(accepted, gamma)))
        target, drafter = Call("target", 1, 1.0), Call("drafter", gamma, seconds * gamma)
        pace.observe(
            [
                Step(
                    row=0,
                    gamma=gamma,
                    drafted=(1,) * gamma,
                    parents=tuple(range(-1, gamma - 1)),
                    source=(0,) * gamma,
                    path=path,
                    token=1,
                    target_p=(),
                    draft_p=(),
                    top2_gap=1.0,
                    calls=(drafter, target) if calls and gamma else (target,),
                    draft_s=seconds * gamma if calls else 0.0,
                    verify_s=1.0,
                    sample_s=0.0,
                )
            ]
        )


def test_the_cost_of_a_draft_is_that_of_the_rounds_which_ran_the_model() -> None:
    pace = Controller()
    pace.begin()
    rounds(pace, 12, calls=False, accepted=1, seconds=0.0)
    assert pace.costs.c < 0.01
    for _ in range(8):
        rounds(pace, 3, calls=False, accepted=1, seconds=0.0)
        rounds(pace, 1, calls=True, accepted=1, seconds=0.2)
    assert pace.costs.c == pytest.approx(0.2)  # not the lower third of all rounds, which is 0


# -- who is asked ---------------------------------------------------------------------------------


class Guess(PointDrafter):
    """Always drafts 1, and says how sure it is."""

    chance = 0.2

    def __init__(self) -> None:
        super().__init__(V, lambda row: 1)

    def confidence(self, rows: list[list[int]]) -> list[float]:
        return [self.chance] * len(rows)


class Second(PointDrafter):
    """Drafts `token`, and counts how often it was asked."""

    def __init__(self, token: int) -> None:
        super().__init__(V, lambda row: token)
        self.asked = 0

    def propose(self, rows: list[list[int]], budget: Budget, sampler: Sampler) -> Draft:
        self.asked += 1
        return super().propose(rows, budget, sampler)


def play(drafter: FallbackDrafter, text: int, count: int, price: float, gamma: int = 2) -> list[int]:
    """So many rounds of a text that is one token for ever, where the second drafter's time is worth so many; who
    drafted."""
    row, who = [0], []
    drafter.start([row], ALONE, ALONE)
    for _ in range(count):
        draft = drafter.propose([row], Budget([gamma], opportunity_cost=price), drafting(sampler(0.0, 7), [row]))
        who.append(-1 if draft.source is None else int(draft.source[0, 0]))
        right = 0
        while right < draft.tokens.shape[1] and draft.tokens[0, right] == text:
            right += 1
        path = torch.arange(right)[None]
        empty = torch.empty(1, draft.tokens.shape[1] + 1, V)
        drafter.observe([row], draft, Verdict(path, torch.tensor([text]), empty, empty))
        row = [*row, *[text] * (right + 1)]
    return who


def test_the_second_drafts_where_the_first_is_unsure() -> None:
    for chance, expected in ((0.2, 1), (0.5, -1)):
        first = Guess()
        first.chance = chance
        assert play(FallbackDrafter(first, Second(2), sure=0.35), 2, 4, 0.1) == [expected] * 4


def test_a_second_that_brings_nothing_is_only_asked_now_and_then() -> None:
    wrong = Second(3)
    who = play(FallbackDrafter(Guess(), wrong, sure=0.35, learn=True), 2, 120, 0.1)
    assert sum(one == 1 for one in who[40:]) <= 80 // 9 + 1
    assert wrong.asked >= 10, "it is asked again every so often"


def test_a_second_that_is_right_and_cheap_is_asked_always() -> None:
    who = play(FallbackDrafter(Guess(), Second(2), sure=0.35, learn=True), 2, 60, 0.1)
    assert who == [1] * 60


def test_a_second_that_is_right_but_too_dear_is_not() -> None:
    """Two tokens more a round, in whose time three would come."""
    who = play(FallbackDrafter(Guess(), Second(2), sure=0.35, learn=True), 2, 120, 3.0)
    assert sum(one == 1 for one in who[40:]) <= 80 // 9 + 1


def test_a_first_that_is_right_though_unsure_keeps_its_drafts() -> None:
    """Both draft what comes, one of them for nothing."""
    who = play(FallbackDrafter(Guess(), Second(1), sure=0.35, learn=True), 1, 120, 0.1)
    assert sum(one == 1 for one in who[60:]) <= 60 // 9 + 1


def test_a_second_that_has_nothing_to_say_leaves_the_drafts_to_the_first() -> None:
    silent = PointDrafter(V, lambda row: None)
    draft = FallbackDrafter(Guess(), silent, sure=0.35)
    draft.start([[0]], ALONE, ALONE)
    assert draft.propose([[0]], Budget([2]), drafting(sampler(0.0, 7), [[0]])).tokens.tolist() == [[1, 1]]
