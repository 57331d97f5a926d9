"""Drafts of matches, tables and recalled tokens leave the target's distribution, and under shared noise its text."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats

from sampling.drafters.draft_model import NoDrafter
from sampling.drafters.tables.lookup import (
    LookupDrafter,
)
from sampling.types import Drafter
from tests.sampling.drafters.tables.test_lookup import AGAIN, SAMPLER, growing, tables_of
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support.reference import NaiveLaw
from tests.support.runs import answers, crossed, decode, emitted, enumeration_error, sampler, steps
from tests.support.toys import TableLM
from utils.logits_processors import make_processor

MAKERS: dict[str, Callable[[], Drafter]] = {
    "matches": lambda: LookupDrafter(least=0),
    "tables": lambda: LookupDrafter(tables_of([0, 1, 2, 0, 2, 1, 1, 0]), matches=False, least=0),
    "both": lambda: LookupDrafter(tables_of([2, 0, 1, 2, 2, 0]), least=0),
    "both, cut": lambda: LookupDrafter(tables_of([2, 0, 1, 2, 2, 0]), least=0.2),
    "tree": lambda: growing(recall=True),
}


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_exact_law_is_the_targets(name: str, drafts: str) -> None:
    assert enumeration_error(sure_start(3, 1), MAKERS[name], prompt=PROMPT, length=4, gamma=2, drafts=drafts) < EXACT


@pytest.mark.parametrize("law", [NaiveLaw(temperature=0), NaiveLaw(top_k=2), NaiveLaw(temperature=1.7, top_p=0.8)])
def test_the_exact_law_is_the_targets_under_processors_and_stops(law: NaiveLaw) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "length": 4, "gamma": 2, "law": law}
    assert enumeration_error(sure_start(3, 4), MAKERS["both"], **options) < EXACT
    assert enumeration_error(sure_start(3, 5), MAKERS["both"], **options, stop={1}) < EXACT


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_trees_of_tables_are_exact(nodes: int) -> None:
    prompt = [*PROMPT, 2, 0, 1, 1, 2, 0, 1, 0]
    options: dict[str, Any] = {"prompt": prompt, "length": 4, "gamma": nodes, "law": NaiveLaw(top_k=2)}
    assert enumeration_error(TableLM(3, seed=1), growing, **options) < EXACT


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_and_noise_are_plain_decodings(temperature: float, gamma: int) -> None:
    lm, prompt = TableLM(8, seed=3, sharpness=4.0), [[1, 2, 3], [4], [5, 6, 5, 6, 5]]
    known = tables_of(answers(lm, [[7]], None, SAMPLER, length=40)[0])
    options: dict[str, Any] = {"length": 40, "gamma": gamma, "stop": {0}}
    plain = answers(lm, prompt, None, sampler(temperature, 11), **options)
    before = lm.passes
    assert answers(lm, prompt, LookupDrafter(known, least=0), sampler(temperature, 11), **options) == plain
    assert lm.passes - before < max(map(len, plain))  # drafts were accepted


@pytest.mark.parametrize(("peek", "temperature"), crossed([False, True], [0.0, 0.5, 1.0]))
def test_the_text_of_trees_is_plain_decodings_with_that_seed(peek: bool, temperature: float) -> None:
    recalls, tables = 0, tables_of(AGAIN, [4, 5, 6, 7])
    for seed in range(12):
        alone = answers(TableLM(8, seed=4), [AGAIN], NoDrafter(), sampler(temperature, seed), length=24)
        made = LookupDrafter(tables, tree=True, least=0.0, shared_noise=peek, recall=True)
        run = decode(TableLM(8, seed=4), [AGAIN], made, sampler(temperature, seed), length=24, gamma=6)
        assert emitted(run) == alone
        recalls += sum(step.source.count(made.traits.names.index("recalled")) for step in steps(run))
    assert (recalls > 60) == (temperature > 0)  # a greedy target's distribution says no more than its text


def test_the_first_two_tokens_have_the_targets_law() -> None:
    """Over seeds, where every draft was chosen by the very noise that judges it."""
    model, counts, rounds = TableLM(8, seed=4), torch.zeros(8, 8), 800
    for seed in range(rounds):
        said = answers(model, [AGAIN], growing(shared_noise=True), sampler(1.0, seed), length=3, gamma=4)[0]
        counts[said[0], said[1]] += 1
    law = make_processor(1.0)
    first = law(model.logits([AGAIN]))[0]
    joint = (first[:, None] * law(model.logits([[*AGAIN, token] for token in range(8)]))).flatten()
    seen = joint * rounds >= 5
    observed, wanted = counts.flatten()[seen], joint[seen] * rounds
    rest = torch.tensor([rounds - float(observed.sum()), rounds - float(wanted.sum())])
    assert stats.chisquare([*observed.tolist(), float(rest[0])], [*wanted.tolist(), float(rest[1])]).pvalue > 1e-4
