"""By which rule drafts are judged: every drafter says it, what it drafts agrees, nothing that was drawn chooses it."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sampling.drafters
import sampling.loop
from app.settings.table import Layers
from sampling import speculative_generate
from sampling.drafters.cascade import CascadeDrafter, ChainDrafter, cascade_of, chain_of
from sampling.drafters.draft_heads.eagle import FeatureDrafter, FeatureLM
from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter, Respelled
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.oracle import Oracle
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.models.translated import TranslatedLM, Translation
from sampling.types import Budget, Draft, Drafter, FixedPace, Limits, Rows, Rule, Sampler, Verdict
from sampling.verify.distributions import one_hot
from sampling.verify.rules import verify
from tests.sampling.verify.test_enumeration import EXACT
from tests.support.reference import NaiveLaw
from tests.support.refusals import refused
from tests.support.runs import answers, crossed, enumeration_error, sampler
from tests.support.students import make_student, make_target
from tests.support.toys import PointDrafter, TableLM
from utils.errors import UsageError

V = 8
MODES: dict[str, tuple[float, dict[str, Any]]] = {
    "greedy": (0.0, {}),
    "drawn": (1.0, {}),
    "gumbel": (1.0, {"coupling": "gumbel"}),
    "greedy drafts": (1.0, {"draft_sampling": "greedy"}),
}


def model(**how: Any) -> ModelDrafter:
    return ModelDrafter(TableLM(V, 3, dtype=torch.float32), **how)


def likeliest() -> ModelSource:
    return ModelSource(model().lm)


def points() -> PointDrafter:
    return PointDrafter(V, lambda row: (row[-1] + 1) % V if row[-1] % 3 else None)


def feature(target: Any) -> Any:
    return make_student("feature", target)


class Letters:
    """A vocabulary of letters, one an id."""

    lead, begin = b"", ()

    def __init__(self, letters: str) -> None:
        self.special: dict[str, int] = {}
        self.letters = letters.encode()
        self.by_bytes = {bytes([letter]): token for token, letter in enumerate(self.letters)}

    def spelled(self, token: int) -> bytes:
        return self.letters[token : token + 1]

    def ids(self, text: bytes) -> list[int]:
        return [*map(self.letters.index, text)]


def respelled(target: Any) -> Proposer:
    """The target itself drafts, in an alphabet of another order."""
    by = Translation.of(Letters("abcdefgh"), Letters("hgfedcba"), (V, V))
    return Proposer([Respelled(TranslatedLM(CausalLM(target), by, V))], least=0.0)


DRAFTERS: dict[str, tuple[type, Rule, Callable[[Any], Drafter]]] = {  # of a target
    "none": (NoDrafter, Rule.POINT, lambda target: NoDrafter()),
    "ngram": (NgramDrafter, Rule.POINT, lambda target: NgramDrafter(V)),
    "maxgram": (MaxGramDrafter, Rule.POINT, lambda target: MaxGramDrafter()),
    "tables": (LookupDrafter, Rule.POINT, lambda target: LookupDrafter()),
    "tree of tables": (
        LookupDrafter,
        Rule.POINT,
        lambda target: LookupDrafter(tree=True, least=0.0, shared_noise=True),
    ),
    "tree of both": (
        LookupDrafter,
        Rule.POINT,
        lambda target: LookupDrafter(model=likeliest(), tree=True, shared_noise=True),
    ),
    "tables, else a model": (LookupDrafter, Rule.POINT, lambda target: LookupDrafter(model=likeliest())),
    "model": (ModelDrafter, Rule.DRAWN, lambda target: model()),
    "model, its likeliest": (Proposer, Rule.POINT, lambda target: Proposer([likeliest()])),
    "model of other tokens": (Proposer, Rule.POINT, respelled),
    "model, blocks": (ModelDrafter, Rule.BLOCK, lambda target: model(rule=Rule.BLOCK)),
    "tree of a model": (Proposer, Rule.POINT, lambda target: Proposer([likeliest()], tree=True, nodes=9)),
    "feature": (FeatureDrafter, Rule.DRAWN, lambda target: FeatureDrafter(feature(target))),
    "tree of features": (
        Proposer,
        Rule.POINT,
        lambda target: Proposer([ModelSource(FeatureLM(feature(target), "feature", None))], tree=True, nodes=9),
    ),
    "chain of points": (ChainDrafter, Rule.POINT, lambda target: chain_of([NgramDrafter(V), points()], [2, 2])),
    "chain": (ChainDrafter, Rule.DRAWN, lambda target: chain_of([model(), points()], [2, 2])),
    "cascade": (CascadeDrafter, Rule.DRAWN, lambda target: CascadeDrafter(model(), points())),
    "cascade, blocks": (
        ChainDrafter,
        Rule.BLOCK,
        lambda target: cascade_of([model(rule=Rule.BLOCK), points()], [[4, 0], [0, 2]]),
    ),
}


def test_every_way_of_drafting_is_in_this_table() -> None:
    """And so in what follows: a new one has to say its rule."""
    ways = set()
    for found in pkgutil.walk_packages(sampling.drafters.__path__, "sampling.drafters."):
        module = importlib.import_module(found.name)
        ways |= {
            one
            for one in vars(module).values()
            if isinstance(one, type) and one.__module__ == module.__name__ and callable(getattr(one, "propose", None))
        }
    bases = {one for one in ways if one.propose is sampling.types.Drafter.propose}
    assert {one.__name__ for one in bases} == {"Composite", "NoDrafter"}
    storages = {one for one in ways if issubclass(one, NgramDrafter)} - {NgramDrafter}
    assert {one.__name__ for one in storages} == {"NGramStorage", "OneLevelNGramStorage"}  # under other names
    ways -= {Oracle}  # is told the target's tokens: tests/sampling/drafters/test_oracle.py
    assert (ways - bases - storages) | {NoDrafter} == {kind for kind, _, _ in DRAFTERS.values()}


class Watched:
    """Passes everything on and keeps what was drafted."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.drafts = inner, list[Draft]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        self.drafts.append(self.inner.propose(rows, budget, sampler))
        return self.drafts[-1]


@pytest.mark.parametrize(
    ("name", "mode"), [*crossed(DRAFTERS, ["drawn"]), *crossed(DRAFTERS, ["greedy", "gumbel", "greedy drafts"])]
)
def test_what_is_drafted_is_what_the_rule_says(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws come with drawn drafts only, trees never with blocks, and one rule judges from the first round to the last;
    of one row and of two, where the drafter follows two."""
    kind, rule, make = DRAFTERS[name]
    temperature, options = MODES[mode]
    used = list[Rule]()

    def noted(*given: Any) -> Verdict:
        used.append(given[-1])
        return verify(*given)

    monkeypatch.setattr(sampling.loop, "verify", noted)
    target = make_target(V)
    for prompts in ([[1, 2, 3, 1, 2]], [[1, 2, 3, 1, 2], [4, 5, 4]]):
        watched = Watched(make(target))
        assert isinstance(watched.inner, kind)
        assert watched.inner.traits.rule is rule
        drawing = sampler(temperature, 5, **options)
        assert answers(CausalLM(target), prompts, watched, drawing, length=16, gamma=4)  # type: ignore[arg-type]
        drawn = rule is not Rule.POINT and mode == "drawn"
        assert set(used) == {rule if drawn else Rule.POINT}
        used.clear()
        for draft in watched.drafts:
            assert draft.probs is None or drawn
            assert rule is not Rule.BLOCK or all(tree.is_chain for tree in draft.trees)
        if kind is not NoDrafter:
            assert any(draft.width for draft in watched.drafts), "nothing was drafted: the test shows nothing"
        if drawn:
            assert any(draft.probs is not None for draft in watched.drafts)


# -- blocks beside siblings -----------------------------------------------------------------------

PROMPT = [0, 1, 0]


def error(make: Callable[[], Drafter], together: int = 1) -> float:
    """How far five tokens of 2 ids at gamma 3, every branch taken, lie from the target's distribution."""
    options: dict[str, Any] = {"prompt": PROMPT, "length": 5, "gamma": 3, "law": NaiveLaw(), "together": together}
    return enumeration_error(TableLM(2, 1), make, **options)


class Siblings(ModelDrafter):
    """Of chains with less than 3 tokens the other token stands beside the first: all that is left is drawn."""

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        draft = super().propose(rows, budget, sampler)
        count = draft.width
        if draft.probs is None or not 0 < count < 3:
            return draft
        (tokens,) = draft.tokens
        other = torch.tensor([[1 - tokens[0]]])
        return Draft.of(
            [[*tokens, 1 - tokens[0]]],
            torch.cat([draft.probs, one_hot(other, draft.probs)], dim=1),
            parents=[*range(-1, count - 1), -1],
        )


def two(kind: type[ModelDrafter] = ModelDrafter, **how: Any) -> Callable[[], Drafter]:
    """Chains that end after an unlikely token."""
    return lambda: kind(TableLM(2, 5, sharpness=1.0), least=0.2, **how)


def by_what_was_drawn(*given: Any) -> Verdict:
    """The judge as it was once chosen: chains as blocks, whatever else the drafter might have drafted."""
    draft: Draft = given[1]
    chain = all(tree.is_chain for tree in draft.trees) and draft.probs is not None
    return verify(*given[:-1], Rule.BLOCK if chain else Rule.DRAWN)


def test_each_rule_alone_is_exact_and_one_that_the_draft_chooses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a chain depends on what is drawn, and so do its siblings."""
    assert error(two(rule=Rule.BLOCK), 128) < EXACT
    assert error(two(Siblings)) < EXACT
    monkeypatch.setattr(sampling.loop, "verify", by_what_was_drawn)
    assert error(two(), 128) < EXACT  # chains only: always the same rule
    assert error(two(Siblings)) > 1e-3


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize("name", ["blocks, chain", "blocks, cascade"])
def test_point_masses_beside_drawn_drafts_are_judged_by_the_same_rule(name: str, drafts: Any) -> None:
    def some() -> PointDrafter:
        return PointDrafter(3, lambda row: 0 if row[-1] else None)

    def drawn() -> ModelDrafter:
        return ModelDrafter(TableLM(3, 7, name="drawn"), rule=Rule.BLOCK)

    makers: dict[str, Callable[[], Drafter]] = {
        "blocks, chain": lambda: chain_of([drawn(), some()], [1, 1]),
        "blocks, cascade": lambda: cascade_of([drawn(), some()], [[2, 0], [0, 1]], 2.0),
    }
    options: dict[str, Any] = {"prompt": PROMPT, "length": 4, "gamma": 2, "law": NaiveLaw(top_k=2), "drafts": drafts}
    assert enumeration_error(TableLM(3, 1), makers[name], **options) < EXACT


def test_drafters_that_cannot_go_together_are_refused_by_name() -> None:
    refused(
        chain_of,
        [model(), LookupDrafter(tree=True, shared_noise=True)],
        [1, 1],
        match=r"^match: shared_noise must be False beside drafters that draw$",
    )


def test_settings_that_exclude_each_other_are_refused_wherever_they_are_set() -> None:
    grown = "dynamic"
    line = f"verify block judges chains, expand {grown} grows trees: choose verify token or expand none"
    both = {"verify": "block", "expand": grown}
    variables = {f"SPEC_{name.upper()}": value for name, value in both.items()}
    for layers in (
        Layers.of(flags=both),
        Layers.of(environ=variables),
        Layers.of(pair_defaults=both),
        Layers.of(pair_defaults={"expand": grown}, flags={"verify": "block"}),
    ):
        with pytest.raises(UsageError, match=f"^{line}$"):
            assert layers.settings
    refused(Layers.of(flags={"verify": "block"}).resolve, {"expand": grown}, match=f"^{line}$", kind=UsageError)
    chains = Layers.of(flags={"expand": grown})
    refused(
        chains.with_console_changes,
        verify="block",
        match=rf"^{line} \(still verify token, expand {grown}\)$",
        kind=UsageError,
    )
    assert chains.with_console_changes(verify="block", expand="none").settings.verify == "block"
    assert Layers.of(flags={"verify": "block"}).settings.expand == "auto"


def test_a_drafter_without_traits_is_refused_by_name() -> None:
    class Nameless:
        def propose(self, *given: Any) -> Draft:
            raise AssertionError("it is never asked")

    refused(
        speculative_generate,
        [1],
        Nameless(),
        TableLM(V, 1),
        match=r"^drafter must have `traits`, among them the rule that judges its drafts",
    )


def test_a_drafter_that_calls_its_draws_point_masses_is_exact_all_the_same() -> None:
    """Rule.POINT is lossless however drafts were chosen: a wrong promise costs acceptance only."""

    class Wrong(ModelDrafter):
        def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
            self.traits = replace(self.traits, rule=Rule.DRAWN)
            draft = super().propose(rows, budget, sampler)
            self.traits = replace(self.traits, rule=Rule.POINT)
            return draft

    def make() -> Drafter:
        made = Wrong(TableLM(3, 7))
        made.traits = replace(made.traits, rule=Rule.POINT)
        return made

    assert enumeration_error(TableLM(3, 1), make, prompt=PROMPT, length=4, gamma=2, law=NaiveLaw(top_k=2)) < EXACT


def test_blocks_of_a_tree_are_an_error() -> None:
    class Twins(ModelDrafter):
        def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
            return Draft.of([[1, 2]], torch.full((1, 2, V), 1 / V), parents=[-1, -1])

    events = generate(
        TableLM(V, 1, dtype=torch.float32),
        [[1]],
        Twins(TableLM(V, 3), rule=Rule.BLOCK),
        sampler(1.0),
        Limits(8),
        pace=FixedPace(2),
    )
    refused(list, events, kind=ValueError, match="block verification judges chains; the draft is a tree")


def test_a_law_of_one_token_is_all_on_it() -> None:
    laws: Tensor = one_hot(torch.tensor([[2, 0]]), torch.zeros(1, 3))
    assert laws.tolist() == [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]
