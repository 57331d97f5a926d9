"""Trees that look at the noise of the target's draw: better guesses, the same text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats

from sampling.drafters.none import NoDrafter
from sampling.drafters.table_tree import BELIEVED, SURE, TableTreeDrafter
from sampling.drafters.tables import CHANCE
from sampling.sampler import KeyedSampler
from sampling.types import Rows
from tests.runs import answers, decode, steps
from tests.toys import TableLM
from utils.logits_processors import make_processor

PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]
LENGTH = 24


def sampler(temperature: float, seed: int = 0) -> KeyedSampler:
    return KeyedSampler(make_processor(temperature), seed)


def drafter(peek: bool) -> TableTreeDrafter:
    return TableTreeDrafter(None, least=0.0, peek=peek)


def proposed(made: TableTreeDrafter, rows: Rows, drawing: KeyedSampler, nodes: int = 6) -> Any:
    made.start(rows, None, None)  # type: ignore[arg-type]
    return made.propose(rows, [nodes], drawing.drafting())


# -- the noise that is told is the noise that decides ----------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.6])
def test_logits_and_noise_together_say_what_is_drawn(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = list(range(40))
    for position in range(60):
        logits = torch.randn(1, 40, generator=generator) * 2
        drawing = sampler(temperature, seed=position)
        drawn = drawing.draw(drawing.law(logits, []), torch.tensor([[3, position]]))
        told = torch.tensor(drawing.drafting().noise(3, position, ids))
        assert int(drawn) == int((logits[0].log_softmax(-1) + told).argmax())


def test_it_is_centred_and_grows_with_the_temperature() -> None:
    many = sampler(0.8).noise(0, 5, range(20_000))
    assert abs(sum(many) / len(many)) < 0.02
    spread = stats.tstd(many)
    assert abs(spread - 0.8 * math.pi / math.sqrt(6)) < 0.02
    assert sampler(1.6).noise(0, 5, [7]) == [2 * sampler(0.8).noise(0, 5, [7])[0]]
    assert sampler(0.0).noise(0, 5, [7, 8]) == [0.0, 0.0]


# -- the drafter -----------------------------------------------------------------------------------


def test_without_noise_nothing_changes() -> None:
    for drawing in (sampler(0.0), sampler(0.7)):
        plain = proposed(drafter(False), [PROMPT], drawing)
        same = proposed(drafter(drawing.processor.greedy), [PROMPT], drawing)
        assert torch.equal(plain.tokens, same.tokens)


def test_chances_are_weighed_by_half_of_the_noise() -> None:
    """Behind "1 2" 4 came last; behind "2" alone too, so 4 is offered once, and by no other match anything else."""
    drawing = sampler(1.0)
    made = drafter(True)
    made.start([PROMPT], None, None)  # type: ignore[arg-type]
    made.propose([PROMPT], [1], drawing.drafting())
    (noise,) = drawing.noise(0, len(PROMPT), [4])
    seen, index = made._noise(len(PROMPT), drawing.drafting()), made._indices[0]
    offered = made._first([PROMPT], list(made._offered(index, PROMPT)), seen)
    first = made._grown(index, PROMPT, 1, seen, offered)[0]
    assert first.found.token == 4
    assert first.worth == pytest.approx(min(SURE, CHANCE[2] * math.exp(BELIEVED * noise)))


def test_rows_keep_their_noise_when_others_have_ended() -> None:
    rows = [PROMPT, [5, 6, 5], PROMPT]
    made = drafter(True)
    made.start(rows, None, None)  # type: ignore[arg-type]
    made.select(torch.tensor([2]))
    asked: list[tuple[int, int]] = []

    class Noted:
        def noise(self, row: int, position: int, ids: list[int]) -> list[float]:
            asked.append((row, position))
            return [0.0] * len(ids)

    made.propose([PROMPT], [3], Noted())  # type: ignore[arg-type]
    assert asked[0] == (2, len(PROMPT))
    assert {row for row, _ in asked} == {2}
    assert [position for _, position in asked] == [len(PROMPT) + depth for depth in range(len(asked))]


# -- what is said ------------------------------------------------------------------------------------


def lm() -> TableLM:
    return TableLM(8, seed=4)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_text_is_plain_decodings_with_that_seed(temperature: float) -> None:
    for seed in range(20):
        said = [
            answers(lm(), [PROMPT], made, sampler(temperature, seed), length=LENGTH, gamma=6)[0]
            for made in (NoDrafter(), drafter(False), drafter(True))
        ]
        assert said[0] == said[1] == said[2]


def test_the_first_two_tokens_have_the_targets_law() -> None:
    """Over seeds, where every draft was chosen by the very noise that judges it."""
    model, counts, rounds = lm(), torch.zeros(8, 8), 1500
    for seed in range(rounds):
        said = answers(model, [PROMPT], drafter(True), sampler(1.0, seed), length=3, gamma=4)[0]
        counts[said[0], said[1]] += 1
    law = make_processor(1.0)
    first = law(model.logits([PROMPT]))[0]
    joint = (first[:, None] * law(model.logits([[*PROMPT, token] for token in range(8)]))).flatten()
    seen = joint * rounds >= 5
    observed, wanted = counts.flatten()[seen], joint[seen] * rounds
    rest = torch.tensor([rounds - float(observed.sum()), rounds - float(wanted.sum())])
    result = stats.chisquare([*observed.tolist(), float(rest[0])], [*wanted.tolist(), float(rest[1])])
    assert result.pvalue > 1e-4


def test_guesses_get_better() -> None:
    """Of equally many drafts more are accepted: the noise tells which of the likely tokens it will be."""
    held = {}
    for peek in (False, True):
        model = TableLM(4, seed=4, sharpness=1.0)
        runs = [decode(model, [[1, 2]], drafter(peek), sampler(1.0, seed), length=150, gamma=4) for seed in range(8)]
        rounds = [step for run in runs for step in steps(run)]
        held[peek] = sum(len(step.path) for step in rounds) / sum(len(step.drafted) for step in rounds)
    assert held[True] > 1.1 * held[False]
