"""The builder of drafts: the likeliest of what its sources offer, as trees and chains; when a model among them is
asked, what is learned of it, and that the text stays the target's.
"""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from app.lanes.drafters import PairDrafters
from app.settings.table import Settings
from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter
from sampling.drafters.proposal import (
    NO_NOISE,
    Candidate,
    Node,
    Offer,
    Proposer,
    Source,
    pooled,
)
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.table_file import StaticTables
from sampling.gamma.constants import MAX_PROB, MODEL_GAIN_WORTH, MODEL_GAINS, RETRY
from sampling.gamma.ratios import Ratios
from sampling.models.causal import CausalLM
from sampling.sampler import gumbel
from sampling.types import Budget, Draft, NodeCosts, Rows, Rule, Verdict
from tests.sampling.drafters.tables.test_lookup import tables_of
from tests.support.runs import answers, crossed, decode, drafting, emitted, sampler, steps
from tests.support.students import make_drafter, make_student, make_target, text
from tests.support.toys import ALONE, Given, TableLM, ToyLM, parents_of

V = 12
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]  # behind "1 2" came 4 last, behind "2" alone too
ROW = [1, 2, 3, 4, 5]  # nothing is repeated: nothing is offered
Said = dict[tuple[int, ...], list[Offer]]  # behind the drafted tokens


class Told(Source):
    """Offers what it was told."""

    name = "told"

    def __init__(self, said: Said) -> None:
        self.said = said

    def offers(self, node: Node) -> list[Offer]:
        return self.said.get(tuple(node.tokens), [])


def thinking(*chances: float, **how: Any) -> ToyLM:
    """A model that thinks the same everywhere."""
    logits = [math.log(p) if p else -30.0 for p in chances]
    return ToyLM(V, lambda prefix: [*logits, *[-30.0] * (V - len(logits))], name="trained", **how)


def beside(lm: Any, said: Said | None = None, **how: Any) -> Proposer:
    """The model beside what is said."""
    return Proposer([Told(said or {}), ModelSource(lm)], **({"tree": True} | how))


def proposed(made: Proposer, rows: Rows, *depths: int, started: bool = False, **how: Any) -> Draft:
    session = TableLM(V).open(rows)
    if not started:
        made.start(rows, session, session)
    return made.propose(rows, Budget([*depths], **how), drafting(sampler(0.0), rows))


def judged(made: Proposer, row: list[int], draft: Draft, path: list[int]) -> None:
    laws = torch.full((1, draft.width + 1, V), 1 / V)
    made.observe([row], draft, Verdict([path], [0], Given(laws), laws.log()))


def who(made: Proposer, draft: Draft) -> list[str]:
    return [made.traits.names[source] for source in draft.trees[0].source]


# -- the draft --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> StaticTables:
    noise = torch.Generator().manual_seed(1)
    return tables_of(*(torch.randint(0, 6, (60,), generator=noise).tolist() for _ in range(30)))


@given(row=st.lists(st.integers(0, 5), min_size=2, max_size=40), nodes=st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_nodes_come_best_first_and_siblings_differ(row: list[int], nodes: int, tables: StaticTables) -> None:
    """A smaller tree is the beginning of a larger one, a chain the best child of each of its nodes."""
    tree, chain = (LookupDrafter(tables, tree=wide, least=0.01) for wide in (True, False))
    whole, some, few = (
        proposed(tree, [row], *depths, max_nodes=most)
        for depths, most in (((8,), 1 << 10), ((8,), nodes), ((8,), max(1, nodes // 2)))
    )
    tokens, parents = some.tokens[0], parents_of(some)
    assert len(tokens) <= nodes
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
    assert all(parent < node for node, parent in enumerate(parents))
    for fewer in (some, few):
        count = fewer.width
        assert fewer.tokens == [whole.tokens[0][:count]]
        assert parents_of(fewer) == parents_of(whole)[:count]
    at, parents, found = -1, parents_of(whole), list[int]()
    while at in parents:
        at = parents.index(at)
        found.append(int(whole.tokens[0][at]))
    assert proposed(chain, [row], 8).tokens == [found]


def test_rows_of_a_batch_and_targets_that_take_no_trees_get_chains(tables: StaticTables) -> None:
    rows = [[0, 1, 2, 0, 1], [3, 4, 3, 4, 3]]
    drafts = [proposed(LookupDrafter(tables, tree=wide), rows, 4, 3) for wide in (True, False)]
    assert drafts[0].tokens == drafts[1].tokens
    assert all(tree.is_chain for tree in drafts[0].trees)
    wide = LookupDrafter(tables, tree=True)
    session: Any = SimpleNamespace(**{**vars(ALONE), "takes_trees": False})
    wide.start(rows[:1], session, session)
    assert proposed(wide, rows[:1], 4, started=True).tokens[0] == drafts[1].tokens[0]


def test_a_node_must_be_worth_its_place_in_the_pass() -> None:
    said: Said = {(): [(1, 0.6), (2, 0.6)], (1,): [(3, 0.9)], (1, 3): [(4, 0.1)]}
    costs = NodeCosts(calibration=1.0, v=(1.0, 1.1, 1.2, 1.3, 2.3), rate=2.0)  # .2 for each of three, 2 for a fourth
    draft = proposed(Proposer([Told(said)], tree=True), [ROW], 4, costs=costs)
    assert draft.tokens == [[1, 3, 2]]
    assert draft.promised == pytest.approx(0.6 + 0.6 * 0.9 * 0.85 + 0.4 * 0.6)
    dear = NodeCosts(calibration=1.0, v=(1.0, 1.5, 2.0), rate=2.0)
    assert proposed(Proposer([Told(said)], tree=True), [ROW], 4, costs=dear).tokens == [[]]


def test_a_later_source_counts_for_what_the_others_leave() -> None:
    draft = proposed(
        Proposer([Told({(): [(1, 0.5), (2, 0.1)]}), Told({(): [(3, 0.4), (1, 0.3)]})], tree=True), [ROW], 1, max_nodes=4
    )
    assert draft.tokens == [[1, 3, 2]]
    assert draft.promised == pytest.approx(0.5 + 0.5 * 0.4 + 0.5 * 0.6 * 0.1)


# -- what several say of a token ------------------------------------------------------------------


def test_an_agreement_makes_a_token_likelier_and_who_adds_most_is_named() -> None:
    said = [Candidate(1, 0, 0.3, 0.3), Candidate(2, 1, 0.3, 0.3)]
    trust = (1.0, 0.5, 0.8)
    found = (pooled(trust, said, [*more, (3, 0.2)], 0, NO_NOISE) for more in ((), [(2, 0.3)]))
    alone, both = ({one.token: one for one in candidates} for candidates in found)
    assert both[2].p > alone[2].p
    assert alone[1].p > alone[2].p  # source 0 is believed more
    assert [(both[token].source, both[token].prob) for token in (1, 2, 3)] == [(0, 0.3), (2, 0.3), (2, 0.2)]
    assert alone[2].source == 1
    assert all(sum(one.p for one in each.values()) <= 1 for each in (alone, both))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.lists(st.floats(0, 1), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_chances_of_all_tokens_never_exceed_one(others: list[float], own: list[float]) -> None:
    said = [Candidate(token, 0, p / len(others), p) for token, p in enumerate(others)]
    found = pooled((0.9, 0.6), said, [(token + 2, p / len(own)) for token, p in enumerate(own)], 0, NO_NOISE)
    assert sum(one.p for one in found) <= 1
    assert max(one.p for one in found) <= MAX_PROB


def test_the_noise_lifts_what_it_favours() -> None:
    said = [Candidate(1, 0, 0.3, 0.3), Candidate(2, 0, 0.3, 0.3)]
    for key in range(20):
        plain, noisy = (pooled((1.0, 0.5), said, [(3, 0.1)], 2, noise) for noise in (NO_NOISE, (3, key, 1.0)))
        (first, second), (lifted, other) = gumbel(key, 5, [1, 2]), (noisy[at].p / plain[at].p for at in (0, 1))
        assert (lifted > other) == (first > second)


# -- when a model is asked -------------------------------------------------------------------------


def test_where_nothing_was_said_the_models_likeliest_are_offered() -> None:
    made = beside(thinking(0.2, 0.5, 0.3))
    draft = proposed(made, [ROW], 1, max_nodes=3)
    assert draft.tokens == [[1, 2, 0]]
    assert parents_of(draft) == [-1] * 3
    assert set(who(made, draft)) == {"trained"}
    assert [(call.model, call.passes) for call in draft.calls] == [("trained", 1)]


def test_it_is_not_asked_where_what_was_said_is_sure_nor_below() -> None:
    lm = thinking(1.0)
    draft = proposed(beside(lm, {(): [(5, 0.9)], (5,): []}), [ROW], 3)
    assert draft.tokens == [[5]]
    assert draft.calls == ()
    assert lm.passes == 0


def test_it_is_asked_again_as_long_as_the_others_are_unsure() -> None:
    """The likeliest path is the model's own 0; behind 0 0 what is said is sure."""
    lm = thinking(1.0)
    made = beside(lm, {(0, 0): [(7, 0.95)], (0, 0, 7): [(8, 0.95)]}, tree=False)
    draft = proposed(made, [ROW], 4)
    assert draft.tokens == [[0, 0, 7, 8]]
    assert who(made, draft) == ["trained", "trained", "told", "told"]
    assert lm.passes == draft.calls[0].passes == 2


def test_rows_of_a_batch_and_rows_beyond_its_context_do_without_it() -> None:
    said: Said = {(): [(4, 0.4)]}
    lm = thinking(1.0, context=len(PROMPT))
    made = beside(lm, said)
    assert proposed(made, [PROMPT], 2).tokens == [[4]]
    assert made.sessions == ()  # the prompt fills its context
    made = beside(lm, said)
    assert proposed(made, [PROMPT[1:]], 1, max_nodes=2).tokens == [[0, 4]]
    assert proposed(made, [PROMPT], 1, max_nodes=2, started=True).tokens == [[4]]
    passes = lm.passes
    assert proposed(made, [ROW, ROW], 2, 2).tokens == [[4], [4]]  # the answer before had one row
    made.select(torch.tensor([0]))
    assert proposed(made, [ROW], 2, started=True).tokens == [[4]]
    assert lm.passes == passes


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("right", "price"), [(False, 0.2), (True, 0.2), (True, 3.0), (False, None)])
def test_it_is_asked_while_that_pays_and_now_and_then(right: bool, price: float | None, tree: bool) -> None:
    """One that brings nothing is soon asked in every ninth round only, and so is one that is too dear."""
    made, asked = beside(thinking(1.0), learn=True, tree=tree), list[bool]()
    for _ in range(80):
        draft = proposed(made, [ROW], 1, opportunity_cost=price, started=bool(asked))
        asked.append(bool(draft.calls))
        judged(made, ROW, draft, [0] if right and asked[-1] else [])
    if right and price == 0.2:
        assert all(asked)
    else:
        assert asked[40:].count(True) in (4, 5)
        late = [at for at, was in enumerate(asked) if was][-4:]
        assert {after - before for before, after in pairwise(late)} == {RETRY + 1}


def test_one_whose_tokens_the_others_would_have_drafted_brings_nothing() -> None:
    ratios = Ratios()
    made = beside(thinking(0.0, 1.0), {(): [(1, 0.3)], (2,): []}, learn=True, ratios=ratios)
    draft = proposed(made, [ROW], 1)
    assert draft.calls
    assert draft.tokens == [[1]]
    judged(made, ROW, draft, [0])
    assert ratios.of(("gain", 0), MODEL_GAINS[0], MODEL_GAIN_WORTH).value < MODEL_GAINS[0]


def test_what_it_brings_is_learned_by_depth_from_rounds_in_which_it_was_asked() -> None:
    ratios = Ratios()

    def gains() -> list[float]:
        return [ratios.of(("gain", depth), MODEL_GAINS[depth], MODEL_GAIN_WORTH).value for depth in (0, 1)]

    made = beside(thinking(1.0), learn=True, tree=False, ratios=ratios)
    draft = proposed(made, [ROW], 2, opportunity_cost=0.05)
    assert draft.calls[0].passes == draft.width == 2
    judged(made, ROW, draft, [0])
    first = gains()
    assert first[0] > MODEL_GAINS[0]
    assert first[1] < MODEL_GAINS[1]  # the second of its tokens was refused
    for _ in range(10):
        judged(made, ROW, Draft.empty(1), [])
    assert gains() == first


@pytest.mark.parametrize(("price", "depth"), [(0.04, 2), (0.06, 1)])
def test_the_price_of_a_pass_is_lost_to_every_row(price: float, depth: int) -> None:
    """The second tokens: .1 of what lies behind paths of .9 and .06 is .096, more than twice .04 and less than twice
    .06, though of the first row alone it would be more."""
    lm = ToyLM(
        V,
        lambda prefix: [
            math.log((0.9 if prefix[0] else 0.06) if token == 0 else (0.1 if prefix[0] else 0.94) / 11)
            for token in range(V)
        ],
        name="trained",
    )
    draft = proposed(Proposer([ModelSource(lm)], learn=True), [[1, 2], [0, 2]], 2, 2, opportunity_cost=price)
    assert draft.calls[0].passes == draft.width == depth


# -- the text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peek", "temperature"), crossed([False, True], [0.0, 0.5, 1.0]))
def test_the_text_is_plain_decodings_with_that_seed(peek: bool, temperature: float) -> None:
    thought = 0
    for seed in range(12):
        alone = answers(TableLM(8, seed=4), [PROMPT], NoDrafter(), sampler(temperature, seed), length=24)
        lm = TableLM(8, seed=4, sharpness=1.0)
        made = LookupDrafter(model=ModelSource(lm), tree=True, least=0.0, shared_noise=peek, recall=True, learn=True)
        run = decode(TableLM(8, seed=4), [PROMPT], made, sampler(temperature, seed), length=24, gamma=5)
        assert emitted(run) == alone
        thought += sum(step.source[node] == len(made.traits.names) - 1 for step in steps(run) for node in step.path)
    assert thought > 20


@pytest.mark.parametrize(("kind", "temperature"), crossed(["plain", "glide", "feature"], [0.0, 0.8]))
def test_every_kind_of_student_may_be_asked(kind: str, temperature: float) -> None:
    """Two answers in one conversation over a real network: the student's cache follows trees and rejections."""
    target = make_target(8, seed=10, dtype=torch.float64)
    lm = make_drafter(make_student(kind, target, seed=2, dtype=torch.float64)).lm
    tables = tables_of(*(text(seed, 60, 8) for seed in range(4)))
    made = LookupDrafter(tables, model=ModelSource(lm), tree=True, least=0.0, recall=True, shared_noise=True)
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
        model = ModelSource(TableLM(V, seed=4, sharpness=1.0)) if joint else None
        made = LookupDrafter(model=model, tree=True, least=0.0)
        runs = [decode(TableLM(V, seed=4), [[1, 2]], made, sampler(1.0, seed), length=80, gamma=4) for seed in range(6)]
        held.append(sum(len(step.path) for run in runs for step in steps(run)))
    assert held[1] > 1.5 * held[0]


def test_the_default_pair_drafts_from_both(default_pair: Any) -> None:
    from app.lanes.lane import PairEngine

    made: PairDrafters = PairEngine(default_pair).drafters
    for chosen in (Settings(gamma="auto"), Settings(gamma=4)):
        traits = made.make("tables+feature", chosen).traits
        assert traits.names == ("match", "tables", "recalled", "feature")
        assert traits.needs_hidden
        assert (traits.rule, traits.tree) == (Rule.POINT, True)
    behind = made.make("match+plain", Settings(gamma="auto")).traits
    assert behind.names == ("match", "plain")
    assert not behind.needs_hidden
    assert not made.make("tables+feature", Settings(gamma="auto", expand="none")).traits.tree


# -- drawn chains -----------------------------------------------------------------------------------


def test_a_chain_ends_behind_the_token_that_makes_it_unlikely() -> None:
    """The token stays; the next one is not drawn. Each row for itself."""
    rows = [[0, 1], [1, 2], [2, 3]]
    long, short = (
        proposed(ModelDrafter(TableLM(V, seed=3, sharpness=3.0), least), rows, 4, 4, 4) for least in (0.0, 0.4)
    )
    lengths = []
    for row in range(3):
        chances = torch.tensor(long.trees[row].draft_prob).cumprod(dim=0).tolist()
        length = next((place for place, chance in enumerate(chances, start=1) if chance < 0.4), 4)
        assert short.tokens[row] == long.tokens[row][:length]
        lengths.append(length)
    assert len(set(lengths)) > 1, "the rows are to end at different places"
    assert short.calls[0].passes == short.width == max(lengths)
