"""A form for the answer: with every drafter the text is plain constrained decoding's; forced tokens cost nothing."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.constraint import FormConstraint
from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter, source_of
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Drafter, Rows, Rule
from tests.sampling.verify.test_prefix_exact import committed_only
from tests.support import cascades
from tests.support.branching import RowSampler, distance, enumerate_rows, softmax
from tests.support.forms import END, PROMPT, SIZE, MaskedForm, NaiveForm, TableState, fits
from tests.support.reference import exact_law
from tests.support.refusals import refused
from tests.support.runs import answers, decode, steps
from tests.support.students import BLOCKS, KINDS, make_drafter, make_student, make_target
from tests.support.toys import LawDrafter, MixedDrafter, PointDrafter, TableLM
from utils.logits_processors import make_processor

EXACT, CAUGHT = 1e-9, 1e-3


def lm(seed: int = 7) -> TableLM:
    return TableLM(SIZE, seed, name="small")


MAKERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "model": lambda: ModelDrafter(lm()),
    "model, same law": lambda: ModelDrafter(lm(1)),
    "model, block": lambda: ModelDrafter(lm(), rule=Rule.BLOCK),
    "model, stops behind an unlikely token": lambda: ModelDrafter(lm(), least=0.4),
    "law": lambda: LawDrafter(lm(9)),
    "drawn, then points": lambda: MixedDrafter(lm(9)),
    "always 3": lambda: PointDrafter(SIZE, lambda row: 3),
    "ngram": lambda: NgramDrafter(SIZE),
    "maxgram": MaxGramDrafter,
    "tables": lambda: LookupDrafter(least=0.0),
    "model, its likeliest": lambda: Proposer([ModelSource(lm())]),
    "tree": lambda: Proposer([ModelSource(lm())], tree=True, least=0.0),
    "look-ups beside a model": lambda: LookupDrafter(model=ModelSource(lm()), tree=True, least=0.0),
    **{name: lambda name=name: cascades.drafter(name, 2.0, SIZE) for name in ("model < model", "chain of models")},
}


def error_of(make: Callable[[], Drafter], drafts: Any = "law", length: int = 4, gamma: int = 2) -> float:
    """The largest error of a probability of an answer."""
    how: dict[str, Any] = {"length": length, "gamma": gamma, "stop": {END}}

    def run(sampler: Any, rows: int) -> list[tuple[int, ...]]:
        return [*map(tuple, answers(lm(1), [list(PROMPT) for _ in range(rows)], make(), sampler, **how))]

    said = enumerate_rows(run, MaskedForm(), drafts)
    assert all(map(fits, said))
    return distance(said, exact_law(lm(1), PROMPT, NaiveForm(), length, {END}))


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize("name", MAKERS)
def test_every_drafter_emits_the_law_of_plain_constrained_decoding(name: str, drafts: str) -> None:
    assert error_of(MAKERS[name], drafts) < EXACT


# -- the negative controls --------------------------------------------------------------------------

real_masked = FormConstraint.masked


@pytest.mark.parametrize("name", ["model", "tree", "look-ups beside a model"])
def test_a_drafter_that_knows_no_mask_is_exact_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowSampler, "drafting", unaware)
    assert error_of(MAKERS[name]) < EXACT


def unaware(self: RowSampler, starts: Any) -> RowSampler:
    """The drafter's sampler in a round, without the form."""
    return RowSampler([], softmax, "law", (dict(starts),), self)


def all_but_the_last(self: FormConstraint, logits: Tensor, prefixes: Rows, ids: Tensor | None = None) -> Tensor:
    """A mutant: the mask is missing at the last place of several."""
    masked = real_masked(self, logits, prefixes, ids)
    if len(prefixes) > 1:
        masked.view(-1, logits.shape[-1])[-1] = logits.reshape(-1, logits.shape[-1])[-1]
    return masked


def after_four(self: FormConstraint, logits: Tensor, prefixes: Rows, ids: Tensor | None = None) -> Tensor:
    """A mutant: the mask is missing after token 2."""
    return real_masked(self, logits, [prefix if prefix[-1] != 2 else [] for prefix in prefixes], ids)


@pytest.mark.parametrize(
    ("place", "mutant", "name"),
    [
        ("sampling.constraint.FormConstraint.masked", all_but_the_last, "model"),
        ("sampling.constraint.FormConstraint.masked", after_four, "model"),
        ("sampling.verify.distributions.prefixes_of", committed_only, "model"),
        ("sampling.verify.distributions.prefixes_of", committed_only, "always 3"),
    ],
)
def test_a_mask_that_is_missing_at_a_node_or_of_another_one_is_caught(
    place: str, mutant: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, mutant)
    with pytest.raises(AssertionError):
        assert error_of(MAKERS[name]) < CAUGHT


# -- the real sampler ---------------------------------------------------------------------------------


def keyed(temperature: float = 0.0, **how: Any) -> KeyedSampler:
    return KeyedSampler(make_processor(temperature), 3, constraint=FormConstraint(TableState()), **how)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_greedy_and_coupled_texts_are_plain_decodings(name: str, gamma: int, temperature: float) -> None:
    prompts = [PROMPT, [0, 1, 0, 2], [4, 4]] if "tree" not in name else [PROMPT]
    prompts = [[*prompt, 3] for prompt in prompts]  # none is the beginning of another
    how: dict[str, Any] = {"length": 12, "gamma": gamma, "stop": {END}}
    plain = answers(lm(1), prompts, None, keyed(temperature, coupling="gumbel"), **how)
    assert answers(lm(1), prompts, MAKERS[name](), keyed(temperature, coupling="gumbel"), **how) == plain
    assert all(map(fits, plain))


@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
def test_trained_drafters_too(kind: str) -> None:
    """A head with a short list of ids, as a chain and as a tree, beside a target that it reads."""
    target = make_target(SIZE, seed=3, dtype=torch.float64)
    lm = CausalLM(target)
    chain = make_drafter(make_student(kind, target, short=[0, 1, 3, 4]))
    for drafter in (chain, Proposer([source_of(chain.lm)], tree=True, least=0.0)):
        for sampler in (keyed, partial(keyed, 1.0, coupling="gumbel")):
            plain = answers(lm, [PROMPT], None, sampler(), length=14, stop={END})
            assert answers(lm, [PROMPT], drafter, sampler(), length=14, gamma=3, stop={END}) == plain


# -- forced tokens ------------------------------------------------------------------------------------


def forced_lm() -> TableLM:
    """A target that begins with 1, after which 3 4 0 are forced."""
    target = lm(1)
    target.table[:, :, 1] += 50.0
    return target


@pytest.mark.parametrize("name", ["model", "ngram", "tree", "look-ups beside a model"])
def test_forced_tokens_are_accepted_cost_no_draft_and_may_be_more_than_gamma(name: str) -> None:
    drafter = MAKERS[name]()
    small = drafter.models[0] if drafter.models else None
    forced, rounds = (
        len(drafter.traits.names),
        steps(decode(forced_lm(), [PROMPT], drafter, keyed(), length=9, gamma=1)),
    )
    assert [token for step in rounds for token in step.emitted] == [1, 3, 4, 0, 1, 3, 4, 0, 1]
    assert rounds[1].drafted[:3] == (3, 4, 0)
    assert all(node in step.path for step in rounds for node, source in enumerate(step.source) if source == forced)
    assert sum(step.source.count(forced) for step in rounds) == 6
    assert small is None or small.passes <= 4  # one each time after 3 4 0, and those that read the prompt


def test_drafts_of_forced_tokens_keep_within_the_limits() -> None:
    """The target's own token needs room, too; where nothing else is drafted they still are."""
    for length in range(1, 9):
        rounds = steps(decode(forced_lm(), [PROMPT], NgramDrafter(SIZE), keyed(), length=length, gamma=1))
        assert [token for step in rounds for token in step.emitted] == [1, 3, 4, 0, 1, 3, 4, 0, 1][:length]
        assert all(len(step.drafted) < length for step in rounds)
    assert len(steps(decode(forced_lm(), [PROMPT], NgramDrafter(SIZE), keyed(), length=9, gamma=0))) == 3


def test_the_end_is_all_that_follows_a_whole_answer() -> None:
    target = lm(1)
    target.table[:, :, [2, 4]] += 50.0
    target.table[:, :, END] -= 100.0
    assert answers(target, [PROMPT], NgramDrafter(SIZE), keyed(), length=9, stop={END}) == [[2, 4, END]]


def test_prompts_that_begin_with_another_are_refused() -> None:
    refused(answers, lm(), [PROMPT, [*PROMPT, 1]], None, keyed(), length=3, match="beginnings of others")
    assert len(answers(lm(), [PROMPT, PROMPT], None, keyed(), length=3)) == 2


def test_the_form_wins_over_a_ban_and_a_drafter_may_lack_its_ids() -> None:
    constraint = FormConstraint(TableState())
    constraint.begin([PROMPT])
    banned = torch.tensor([[0.0, -math.inf, -math.inf, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    masked = constraint.masked(banned, [PROMPT, [*PROMPT, 2]]).softmax(dim=-1)
    assert masked[0].tolist() == [0, 0.5, 0.5, 0, 0, 0]  # 1 and 2 are all that can begin an answer
    assert (masked[1] > 0).tolist() == [True, False, False, True, True, False]
    few = torch.tensor([0, 3])
    assert constraint.masked(banned[:1, few], [PROMPT], few).tolist() == [[0.0, 1.0]]
