"""Typical acceptance, the lossy rule: its law is the rule's own, computed here token by token, and not the target's."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sampling.loop
from sampling.drafters.draft_model import ModelDrafter
from sampling.types import Draft, Drafter, Rows, Rule, Sampler, Verdict
from sampling.verify.distributions import HostDistributions, distributions_for
from sampling.verify.rules import Keys, rule_of, verify, verify_typical
from tests.sampling.verify.test_enumeration import EXACT, PROMPT
from tests.sampling.verify.test_negative_controls import CAUGHT
from tests.support.branching import RowSampler, distance, enumerate_rows, softmax
from tests.support.reference import NaiveLaw, exact_law
from tests.support.runs import answers, greedy, sampler
from tests.support.toys import LawDrafter, PointDrafter, TableLM

TARGET = TableLM(3, seed=2, sharpness=3.0)
DRAFTER = TableLM(3, seed=7)
GAMMA, LENGTH = 2, 4
Of = Callable[[list[int]], list[float]]  # a distribution of the next token after a row
LAWS = {"at 1": softmax, "at .6": NaiveLaw(temperature=0.6), "greedy": NaiveLaw(temperature=0.0)}


def lossy(drafter: Drafter) -> Drafter:
    drafter.traits = replace(drafter.traits, rule=Rule.TYPICAL)
    return drafter


def passes(row: list[int], token: int) -> bool:
    """Whether a draft after a row of the target passes."""
    return likely_enough(TARGET.logits([row])[0], token)


def likely_enough(logits: Tensor, token: int) -> bool:
    """The paper's rule for one token, in plain floats."""
    weights = [math.exp(value) for value in logits.tolist()]
    p = [weight / sum(weights) for weight in weights]
    return p[token] > min(0.09, 0.3 * math.exp(sum(each * math.log(each) for each in p)))


def naive_law(p_of: Of, q_of: Of) -> Counter[tuple[int, ...]]:
    """The law of LENGTH tokens after PROMPT: in a round of at most GAMMA drafts x ~ q each in turn stays if it
    passes; else, and after the last, the target draws."""
    law: Counter[tuple[int, ...]] = Counter()

    def go(said: list[int], chance: float, left: int) -> None:
        row = [*PROMPT, *said]
        if len(said) == LENGTH:
            law[tuple(said)] += chance
        elif chance:
            drafts = left > 0 and len(said) < LENGTH - 1
            for token, q in enumerate(q_of(row)) if drafts else [(-1, 1.0)]:
                if drafts and passes(row, token):
                    go([*said, token], chance * q, left - 1)
                else:
                    for own, p in enumerate(p_of(row)):
                        go([*said, own], chance * q * p, GAMMA)

    go([], 1.0, 0)
    return law


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("drafts", ["points", "drawn"])
def test_the_law_is_the_rules_own_and_not_the_targets(law: str, drafts: str) -> None:
    def of(lm: TableLM) -> Of:
        return lambda row: [float(p) for p in LAWS[law](lm.logits([row]))[0]]

    def following(row: list[int]) -> int:
        return (row[-1] + 1) % 3

    def make() -> Drafter:
        return lossy(PointDrafter(3, following) if drafts == "points" else LawDrafter(DRAFTER))

    def run(sampler: RowSampler, rows: int) -> list[tuple[int, ...]]:
        return [tuple(row) for row in answers(TARGET, [PROMPT] * rows, make(), sampler, length=LENGTH, gamma=GAMMA)]

    q_of = (lambda row: [float(token == following(row)) for token in range(3)]) if drafts == "points" else of(DRAFTER)
    said = enumerate_rows(run, LAWS[law], "law", 256)
    assert distance(said, naive_law(of(TARGET), q_of)) < EXACT
    assert distance(said, exact_law(TARGET, PROMPT, LAWS[law], LENGTH, ())) > CAUGHT


def test_both_fates_of_a_draft_are_in_the_proof() -> None:
    rows = [[*PROMPT, first] for first in range(3)]
    assert {passes(row, token) for row in rows for token in range(3)} == {True, False}


def test_the_first_child_that_is_likely_enough_is_accepted_whatever_the_target_would_draw() -> None:
    logits = torch.tensor([0.02, 0.2, 0.78]).log().expand(1, 4, 3)
    draft = Draft.of([[0, 1, 2]], parents=[-1, -1, -1])
    verdict = verify(logits, draft, [[5]], [(0, 1)], greedy(), Rule.TYPICAL)
    assert (verdict.path, verdict.token) == ([[1]], [2])
    assert verify(logits, draft, [[5]], [(0, 1)], greedy(), Rule.POINT).path == [[2]]
    refused = verify(logits, Draft.of([[0]]), [[5]], [(0, 1)], greedy(), Rule.TYPICAL)
    assert (refused.path, refused.token) == ([[]], [2])


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_the_bar_falls_with_the_entropy(sharpness: float) -> None:
    """Of 32 tokens, each drafted in a row of its own: with much entropy some below epsilon pass."""
    logits = sharpness * torch.randn(32, generator=torch.Generator().manual_seed(5))
    draft, keys = Draft.of([[token] for token in range(32)]), [(token, 1) for token in range(32)]
    path = verify(logits.expand(32, 2, 32), draft, [[5]] * 32, keys, greedy(), Rule.TYPICAL).path
    assert path == [[0] if likely_enough(logits, token) else [] for token in range(32)]
    assert sharpness == 3 or any(path[token] and logits.softmax(0)[token] < 0.09 for token in range(32))
    assert sharpness == 0.3 or [] in path


def test_a_token_without_mass_is_never_accepted() -> None:
    logits = torch.tensor([-math.inf, 0.0, 0.0]).expand(1, 2, 3)
    assert verify(logits, Draft.of([[0]]), [[5]], [(0, 1)], greedy(), Rule.TYPICAL).path == [[]]


def test_where_nothing_passes_greedy_text_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, length = TableLM(8, seed=3, dtype=torch.float32), 40
    plain = answers(lm, [PROMPT], None, greedy(), length=length)
    drafter = lossy(ModelDrafter(TableLM(8, seed=4, dtype=torch.float32)))
    assert answers(lm, [PROMPT], drafter, greedy(), length=length) != plain

    def strict(logits: Tensor, draft: Draft, rows: Rows, keys: Keys, sampler: Sampler, rule: Rule) -> Verdict:
        assert rule is Rule.TYPICAL
        distributions: HostDistributions = distributions_for(logits, draft, rows, sampler)
        return Verdict(*verify_typical(draft, keys, distributions, sampler, 2.0, 2.0), distributions, logits)

    monkeypatch.setattr(sampling.loop, "verify", strict)
    assert answers(lm, [PROMPT], drafter, greedy(), length=length) == plain


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_batches_get_each_rows_own_text(heat: float) -> None:
    lm, drafts = TableLM(8, seed=3, dtype=torch.float32), TableLM(8, seed=4, dtype=torch.float32)
    prompts = [PROMPT, [3, 4], [5]]
    together = answers(lm, prompts, lossy(ModelDrafter(drafts)), sampler(heat, draft_sampling="greedy"), length=20)
    first = answers(lm, prompts[:1], lossy(ModelDrafter(drafts)), sampler(heat, draft_sampling="greedy"), length=20)
    assert together[0] == first[0]


def test_the_rule_stays_where_drafts_are_point_masses() -> None:
    assert rule_of(lossy(PointDrafter(3, lambda row: 0)), greedy()) is Rule.TYPICAL
