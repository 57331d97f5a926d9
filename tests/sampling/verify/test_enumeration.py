"""Proof by taking every branch: the loop emits exactly the target's distribution.

The real `verify` and `loop` run under a sampler whose every draw and coin forks. The first token
of an answer comes from the opening round, which drafts nothing; the toys make it certain unless a
test wants otherwise, so that the forks are spent on rounds with drafts. Every drafter is proved with a run a branch;
the variations below take the branches as rows of a batch, which is many times quicker.
"""

from collections.abc import Callable

import pytest
import torch

from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.types import Drafter
from tests.support.reference import NaiveLaw
from tests.support.runs import crossed, enumeration_error
from tests.support.toys import FixedLawDrafter, LawDrafter, MixedDrafter, PointDrafter, TableLM, ToyLM

EXACT = 1e-9
PROMPT = [0, 1, 0]


def sure_start(vocab_size: int, seed: int, **options: float) -> ToyLM:
    """A table toy whose first token after PROMPT is certain (2)."""
    table = TableLM(vocab_size, seed, **options)
    first = [0.0 if token == 2 else -torch.inf for token in range(vocab_size)]
    return ToyLM(vocab_size, lambda prefix: first if list(prefix) == PROMPT else table.logits([prefix])[0])


def always(token: int) -> Callable[[list[int]], int]:
    return lambda row: token


MAKERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "model": lambda: ModelDrafter(TableLM(3, seed=7)),
    "model, same law": lambda: ModelDrafter(TableLM(3, seed=1)),
    "model, sharp": lambda: ModelDrafter(TableLM(3, seed=8, sharpness=6.0)),
    "ngram": lambda: NgramDrafter(3),
    "ngram, one level": lambda: NgramDrafter(3, n=2, multi_level=False, top_k_filler=1),
    "ngram, random fill": lambda: NgramDrafter(3, n=4, multi_level=False, top_k_filler=2, stop_if_unknown=False),
    "law": lambda: LawDrafter(TableLM(3, seed=9)),
    "early stop": lambda: LawDrafter(TableLM(3, seed=9), least_top=0.55),
    "drawn, then points": lambda: MixedDrafter(TableLM(3, seed=9)),
    "always 0": lambda: PointDrafter(3, always(0)),
    "always 2": lambda: PointDrafter(3, always(2)),
    "points, short": lambda: PointDrafter(3, lambda row: (row[-1] + 1) % 3 if len(row) % 2 else None),
    "model, stops behind an unlikely token": lambda: ModelDrafter(TableLM(3, seed=7), least=0.4),
    "model, its likeliest": lambda: Proposer([ModelSource(TableLM(3, seed=7))]),
    "look-ups beside a model": lambda: LookupDrafter(model=ModelSource(TableLM(3, seed=7)), tree=True, least=0.0),
    "certain 1": lambda: FixedLawDrafter([0.0, 1.0, 0.0]),
    "never 2": lambda: FixedLawDrafter([0.5, 0.5, 0.0]),
}


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize("name", MAKERS)
def test_every_drafter_emits_the_targets_law(name: str, drafts: str) -> None:
    assert enumeration_error(sure_start(3, 1), MAKERS[name], prompt=PROMPT, length=4, gamma=2, drafts=drafts) < EXACT


@pytest.mark.parametrize(
    ("name", "limits"),
    crossed(["model", "ngram", "early stop", "always 0"], [(1, 4), (3, 3), (2, 1), (2, 2), (2, 3), (3, 4)]),
)
def test_other_gammas_and_limits(name: str, limits: tuple[int, int]) -> None:
    """From an uncertain first token: the opening round's own fork is part of the proof."""
    gamma, length = limits
    error = enumeration_error(TableLM(3, seed=2), MAKERS[name], prompt=PROMPT, length=length, gamma=gamma, together=128)
    assert error < EXACT


@pytest.mark.parametrize("name", ["model", "ngram", "always 2"])
def test_a_third_draft_is_as_exact_as_the_first(name: str) -> None:
    """gamma 3 with room for all three: five tokens, the first certain."""
    error = enumeration_error(
        sure_start(3, 3),
        MAKERS[name],
        prompt=PROMPT,
        length=5,
        gamma=3,
        law=NaiveLaw(top_k=2),  # two of three tokens: fewer forks
        together=128,
    )
    assert error < EXACT


LAWS = {
    "temperature 0.5": NaiveLaw(temperature=0.5),
    "temperature 1.7": NaiveLaw(temperature=1.7),
    "top-k 2": NaiveLaw(top_k=2),
    "nucleus 0.7": NaiveLaw(top_p=0.7),
    "top-k 2, nucleus 0.8, temperature 1.3": NaiveLaw(1.3, 2, 0.8),
    "min-p 0.3": NaiveLaw(min_p=0.3),
    "greedy": NaiveLaw(temperature=0),
}


@pytest.mark.parametrize(("law", "name"), crossed(LAWS, ["model", "model, sharp", "ngram", "early stop", "never 2"]))
def test_processors_shape_target_and_drafts_alike(law: str, name: str) -> None:
    error = enumeration_error(
        sure_start(3, 4), MAKERS[name], prompt=PROMPT, length=4, gamma=2, law=LAWS[law], together=128
    )
    assert error < EXACT


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize(
    ("name", "stop"), crossed(["model", "ngram", "always 0", "early stop"], [{0}, {1}, {2}, {0, 1}])
)
def test_stop_tokens_inside_drafts_truncate_rightly(name: str, stop: set[int], drafts: str) -> None:
    options = {"prompt": PROMPT, "length": 4, "gamma": 2, "stop": stop, "drafts": drafts, "together": 128}
    assert enumeration_error(sure_start(3, 5), MAKERS[name], **options) < EXACT


def masked(lm: TableLM, banned: Callable[[int], set[int]]) -> ToyLM:
    """The toy without some tokens, by the last token of the prefix."""

    def logits_of(prefix: tuple[int, ...]) -> torch.Tensor:
        row = lm.logits([prefix])[0].clone()
        row[list(banned(prefix[-1]))] = -torch.inf
        return row

    return ToyLM(lm.vocab_size, logits_of)


SUPPORTS: dict[str, tuple[Callable[[int], set[int]], Callable[[int], set[int]], NaiveLaw]] = {  # banned tokens
    "all of the other's, so that everything is refused": (lambda last: {0, 1}, lambda last: {2, 3}, NaiveLaw()),
    "others, changing with the context": (lambda last: {last}, lambda last: {(last + 1) % 4}, NaiveLaw(top_k=2)),
}


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize("name", SUPPORTS)
def test_supports_that_do_not_meet_or_overlap_in_part(name: str, drafts: str) -> None:
    """q(x) > 0 where p(x) = 0 and the reverse."""
    targets, drafters, law = SUPPORTS[name]
    drafter = masked(TableLM(4, seed=4), drafters)
    options = {"prompt": PROMPT, "length": 4, "gamma": 2, "drafts": drafts, "law": law, "together": 128}
    assert enumeration_error(masked(TableLM(4, seed=3), targets), lambda: ModelDrafter(drafter), **options) < EXACT


@pytest.mark.parametrize("name", ["model", "ngram"])
def test_four_tokens_of_vocabulary(name: str) -> None:
    makers = {"model": lambda: ModelDrafter(TableLM(4, seed=12)), "ngram": lambda: NgramDrafter(4)}
    error = enumeration_error(sure_start(4, 11), makers[name], prompt=PROMPT, length=4, gamma=2, law=NaiveLaw(top_k=3))
    assert error < EXACT


def test_the_enumeration_takes_every_branch() -> None:
    """The proof's own tool: all probabilities add up and impossible branches are not taken."""
    from tests.support.branching import BranchingSampler, enumerate_runs

    def run(sampler: BranchingSampler) -> tuple[int, ...]:
        first = int(sampler.draw(torch.tensor([[0.25, 0.0, 0.75]], dtype=torch.float64), torch.tensor([[0, 0]])))
        coin = (
            bool(sampler.coin(torch.tensor([0.1], dtype=torch.float64), torch.tensor([[0, 0, 0, 0]])))
            if first
            else True
        )
        return first, int(coin)

    assert enumerate_runs(run) == {(0, 1): 0.25, (2, 1): pytest.approx(0.075), (2, 0): pytest.approx(0.675)}
