"""Trees of what was said and of what a trained drafter thinks: who is asked when, what that brings, the same text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from app.lanes.drafters import PairDrafters
from app.settings.table import Settings
from sampling.drafters.draft_model import NoDrafter
from sampling.drafters.fallback import PROBE_EVERY
from sampling.drafters.tables.joint_tree import (
    AGREEING,
    ENOUGH,
    FLOOR,
    NOBODY,
    STRONG,
    WEAK,
    Beliefs,
    JointTreeDrafter,
    beliefs,
    pooled,
)
from sampling.drafters.tables.prompt_lookup import CHANCE, MATCH, TABLES, Found
from sampling.drafters.tables.tree import RECALLED, TableTreeDrafter
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.types import Budget, Draft, Limits, Rule, Verdict
from tests.sampling.drafters.tables.test_prompt_lookup import tables_of
from tests.support.runs import answers, decode, drafting, emitted, sampler, steps
from tests.support.students import make_drafter, make_student, make_target, text
from tests.support.toys import TableLM, ToyLM

V = 12
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]  # behind "1 2" came 4 last, behind "2" alone too
ROW = [1, 2, 3, 4, 5]  # nothing is repeated: nothing is offered


def thinking(logits: list[float], **how: Any) -> ToyLM:
    return ToyLM(V, lambda prefix: [*logits, *[-30.0] * (V - len(logits))], name="trained", **how)


def started(lm: Any, rows: list[list[int]], **how: Any) -> JointTreeDrafter:
    made = JointTreeDrafter(lm, **({"least": 0.0} | how))
    session = TableLM(V).open(rows)
    made.start(rows, session, session)
    return made


def judged(made: JointTreeDrafter, row: list[int], draft: Draft, path: list[int]) -> None:
    laws = torch.full((1, draft.tokens.shape[1] + 1, V), 1 / V)
    made.observe([row], draft, Verdict(torch.tensor([path]), torch.tensor([0]), laws, laws.log()))


# -- what is offered -------------------------------------------------------------------------------


def test_where_nothing_was_said_the_drafters_likeliest_are_the_children_of_the_root() -> None:
    made = started(thinking([math.log(p) for p in (0.2, 0.5, 0.3)]), [ROW])
    draft = made.propose([ROW], Budget([3]), drafting(sampler(0.0), [ROW]))
    assert draft.tokens.tolist()[0][:2] == [1, 2]
    assert draft.parents is not None
    assert draft.parents.tolist()[:2] == [-1, -1]
    assert draft.source is not None
    assert {made.traits.names[which] for which in draft.source.tolist()[0][:2]} == {"trained"}
    assert [(call.model, call.passes) for call in draft.calls] == [("trained", 1)]


SHARES, OWN = WEAK.shares, WEAK.own  # of a drafter that nobody has measured


def weight(*said: float, sharpened: float = WEAK.sharpened) -> float:
    return (sum(said) + FLOOR) ** sharpened


def test_each_kind_of_offer_is_believed_in_its_own_way() -> None:
    """Beside a drafter's distribution a match says more than a table; chances of all tokens never exceed one."""
    kinds = (MATCH, TABLES, RECALLED)
    believed = Beliefs((0.9, 0.2, 1.5), own=0.7, sharpened=2.0, noise=1.0)
    found = pooled([Found(kind, kind, 0.3) for kind in kinds], {7: 0.4}, 3, None, believed)
    said = {7: 0.7 * 0.4, **{kind: believed.shares[kind] * 0.3 for kind in kinds}}
    total = NOBODY + sum(weight(one, sharpened=2.0) for one in said.values())
    assert {one.token: one.source for one in found} == {7: 3, MATCH: MATCH, TABLES: TABLES, RECALLED: RECALLED}
    for one in found:
        assert one.p == pytest.approx(weight(said[one.token], sharpened=2.0) / total)
    assert sum(one.p for one in found) == pytest.approx(1 - NOBODY / total)


def test_a_drafter_that_agrees_oftener_is_believed_more() -> None:
    assert beliefs(0.0) == beliefs(AGREEING[0]) == WEAK
    assert beliefs(1.0) == beliefs(AGREEING[1]) == STRONG
    half = beliefs(sum(AGREEING) / 2)
    assert half.own == pytest.approx((WEAK.own + STRONG.own) / 2)
    assert half.shares[TABLES] == pytest.approx((WEAK.shares[TABLES] + STRONG.shares[TABLES]) / 2)


@pytest.mark.parametrize("kind", [TableTreeDrafter, JointTreeDrafter])
def test_any_temperature_can_be_peeked_at(kind: type[TableTreeDrafter]) -> None:
    """Noise in a logit is as large as the temperature: e to the power of it is no number at some thousands."""
    given = () if kind is TableTreeDrafter else (thinking([0.0, 0.0]),)
    made = kind(*given, least=0.0, shared_noise=True)
    alone = answers(TableLM(V), [PROMPT], NoDrafter(), sampler(1e5, 1), length=20)
    assert emitted(decode(TableLM(V), [PROMPT], made, sampler(1e5, 1), length=20, gamma=4)) == alone


def test_below_the_root_the_tree_grows_from_what_was_said() -> None:
    row = [*PROMPT, 7]  # no one knows what follows 7; the drafter says 1, behind which 2 came
    made = started(thinking([-30.0, 0.0]), [row])
    draft = made.propose([row], Budget([2]), drafting(sampler(0.0), [row]))
    assert draft.tokens.tolist() == [[1, 2]]
    assert draft.parents is None
    assert draft.source is not None
    assert [made.traits.names[which] for which in draft.source[0].tolist()] == ["trained", "match"]


# -- who is asked when -----------------------------------------------------------------------------


def test_it_is_not_asked_where_what_was_said_is_sure() -> None:
    row = [*[5, 6, 7, 8, 9] * 2, 5, 6, 7, 8, 9]
    lm = thinking([0.0])
    made = started(lm, [row])
    assert CHANCE[5] > ENOUGH
    draft = made.propose([row], Budget([3]), drafting(sampler(0.0), [row]))
    assert draft.tokens[0, 0] == 5
    assert draft.calls == ()
    assert lm.passes == 0


def test_rows_of_a_batch_and_rows_beyond_its_context_do_without_it() -> None:
    lm = thinking([0.0], context=len(PROMPT))
    made = started(lm, [PROMPT])
    assert made.sessions == ()  # the prompt fills its context
    assert made.propose([PROMPT], Budget([2]), drafting(sampler(0.0), [PROMPT])).tokens[0, 0] == 4
    two = started(lm := thinking([0.0]), [PROMPT, ROW])
    assert two.sessions == ()
    draft = two.propose([PROMPT, ROW], Budget([2, 2]), drafting(sampler(0.0), [PROMPT, ROW]))
    assert draft.tokens[:, 0].tolist() == [4, -1]
    two.select(torch.tensor([0]))
    assert two.propose([PROMPT], Budget([2]), drafting(sampler(0.0), [PROMPT])).tokens[0, 0] == 4
    assert lm.passes == 0


@pytest.mark.parametrize(("rows", "kept"), [(1, (0, 1)), (2, False)])
def test_the_target_keeps_states_for_a_single_row_only(rows: int, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = thinking([0.0])
    monkeypatch.setattr(lm, "reads_hidden", (0, 1), raising=False)
    made, target = JointTreeDrafter(lm), thinking([0.0])
    asked: list[Any] = []
    opened = target.open

    def noted(prompt: Any, *, hidden: Any = False, **others: Any) -> Any:
        asked.append(hidden)
        return opened(prompt, **others)

    monkeypatch.setattr(target, "open", noted)
    next(generate(target, [PROMPT] * rows, made, sampler(0.0), Limits(4)))
    assert asked == [kept]


@pytest.mark.parametrize(("path", "price", "asked"), [([-1], 0.2, 24), ([0], 0.2, 80), ([-1], None, 80)])
def test_it_is_asked_while_that_pays(path: list[int], price: float | None, asked: int) -> None:
    """80 rounds: a drafter that brings nothing is asked now and then, once it is known what its time is worth."""
    made = started(thinking([0.0, *[-30.0] * (V - 1)]), [ROW])
    calls, most = 0, 0
    for _ in range(80):
        draft = made.propose([ROW], Budget([1], opportunity_cost=price), drafting(sampler(0.0), [ROW]))
        calls += len(draft.calls)
        judged(made, ROW, draft, path if draft.tokens.shape[1] else [])
        most = max(most, made.idle)
    assert calls == asked if asked == 80 else calls <= asked
    assert (most == PROBE_EVERY) == (asked < 80)


def test_rounds_in_which_it_was_not_asked_say_nothing_of_it() -> None:
    made = started(thinking([0.0, *[-30.0] * (V - 1)]), [ROW])
    draft = made.propose([ROW], Budget([1], opportunity_cost=0.2), drafting(sampler(0.0), [ROW]))
    assert draft.calls
    judged(made, ROW, draft, [-1])
    known = made.gain.value
    for _ in range(10):
        judged(made, ROW, Draft.empty(1), [])
    assert made.gain.value == known


def test_it_is_always_asked_where_nothing_is_to_be_learned(clock: list[float]) -> None:
    def think(prefix: Any) -> list[float]:
        clock[0] += 5.0
        return [0.0] * V

    made = started(ToyLM(V, think, name="trained"), [ROW], learn=False)
    for _ in range(12):
        draft = made.propose([ROW], Budget([1]), drafting(sampler(0.0), [ROW]))
        assert len(draft.calls) == 1
        judged(made, ROW, draft, [-1])


# -- what comes of it ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("peek", [False, True])
def test_the_text_is_plain_decodings_with_that_seed(peek: bool, temperature: float) -> None:
    thought = 0
    for seed in range(20):
        alone = answers(TableLM(8, seed=4), [PROMPT], NoDrafter(), sampler(temperature, seed), length=24)
        made = JointTreeDrafter(TableLM(8, seed=4, sharpness=1.0), least=0.0, shared_noise=peek, recall=True)
        run = decode(TableLM(8, seed=4), [PROMPT], made, sampler(temperature, seed), length=24, gamma=5)
        assert emitted(run) == alone
        thought += sum(step.source[node] == len(made.traits.names) - 1 for step in steps(run) for node in step.path)
    assert thought > 20


@pytest.mark.parametrize("kind", ["plain", "glide", "feature"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_kind_of_student_may_be_asked(kind: str, temperature: float) -> None:
    """Two answers in one conversation over a real network: the student's cache follows trees and rejections."""
    target = make_target(8, seed=10, dtype=torch.float64)
    lm = make_drafter(make_student(kind, target, seed=2, dtype=torch.float64)).lm
    tables = tables_of(*(text(seed, 60, 8) for seed in range(4)))
    made = JointTreeDrafter(lm, tables, least=0.0, learn=False, recall=True, shared_noise=True)
    asked = 0
    for prompt in (text(7, 9, 8), text(7, 9, 8) + text(8, 30, 8)):
        alone = answers(CausalLM(target), [prompt], None, sampler(temperature, 5), length=30)
        run = decode(CausalLM(target), [prompt], made, sampler(temperature, 5), length=30, gamma=5)
        assert emitted(run) == alone
        asked += sum(len(step.calls) > 1 for step in steps(run))
    assert asked > 10


def test_more_is_accepted_than_of_what_was_said_alone() -> None:
    held = []
    for joint in (False, True):
        model, made = TableLM(V, seed=4), TableTreeDrafter(least=0.0)
        if joint:
            made = JointTreeDrafter(TableLM(V, seed=4, sharpness=1.0), least=0.0, learn=False)  # learn asks the clock
        runs = [decode(model, [[1, 2]], made, sampler(1.0, seed), length=80, gamma=4) for seed in range(6)]
        held.append(sum(len(step.path) for run in runs for step in steps(run)))
    assert held[1] > 1.5 * held[0]


def test_the_default_pair_drafts_from_both(default_pair: Any) -> None:
    from app.lanes.lane import PairEngine

    engine = PairEngine(default_pair)
    made: PairDrafters = engine.drafters
    for settings in (Settings(gamma="auto"), Settings(gamma=4)):
        found = made.make("tables+feature", settings)
        assert isinstance(found, JointTreeDrafter)
        assert found.traits.names == ("match", "tables", "recalled", "feature")
        assert found.traits.needs_hidden
        assert WEAK.own < found.beliefs.own <= STRONG.own  # by what its config says of its training
        assert found.traits.rule is Rule.POINT
    behind = made.make("match+plain", Settings(gamma="auto"))
    assert isinstance(behind, JointTreeDrafter)
    assert behind.traits.names == ("match", "tables", "plain")
    assert not behind.traits.needs_hidden
    assert not isinstance(made.make("tables+feature", Settings(gamma="auto", expand="none")), TableTreeDrafter)
