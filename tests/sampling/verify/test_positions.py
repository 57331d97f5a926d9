"""What a round records for whoever looks into it: alternatives of target and drafter, and the coins that decided."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from sampling.drafters.draft_model import ModelDrafter
from sampling.events import Position, Step, Trial
from sampling.models.causal import CausalLM
from sampling.types import Drafter, Rule
from tests.support.runs import decode, sampler, steps
from tests.support.tiny import TinyPair, tiny_pair
from tests.support.toys import PointDrafter, TableLM, TreeDrafter

PROMPT = [5, 9, 40, 41, 60, 7]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.1)


def test_ten_sampled_tokens_have_the_p_q_and_ranks_that_transformers_computes(pair: TinyPair) -> None:
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (pair.target, pair.drafter)]
    target, drafter = (CausalLM(model, name) for model, name in zip(models, ("target", "drafter"), strict=True))
    rounds = steps(
        decode(target, [PROMPT], ModelDrafter(drafter), sampler(0.8, 3, top_p=0.9), length=10, gamma=3, alternatives=5)
    )
    said = [token for step in rounds for token in step.emitted]
    assert len(said) == 10
    with torch.inference_mode():
        p_logits, q_logits = (model(torch.tensor([PROMPT + said])).logits[0].double() for model in models)
    at, drafted = len(PROMPT) - 1, 0
    for step in rounds:
        for token, position in zip(step.emitted, step.positions, strict=True):
            p = p_logits[at].softmax(-1)
            own = next(likely for likely in position.target if likely.token == token)
            assert own.p == pytest.approx(p[token].item(), rel=1e-3)
            assert own.rank == 1 + int((p > p[token]).sum())
            assert [likely.token for likely in position.target[:5]] == p.topk(5).indices.tolist()
            hot, order = (p_logits[at] / 0.8).softmax(-1).sort(descending=True)
            kept = order[(hot.cumsum(-1) - hot) < 0.9]
            by_hand = (p_logits[at][kept] / 0.8).softmax(-1)[kept.tolist().index(token)]
            assert own.processed == pytest.approx(by_hand.item(), rel=1e-3)
            assert position.entropy == pytest.approx(-(p * p.log2()).sum().item(), rel=1e-3)
            if position.drafter:
                drafted += 1
                q = q_logits[at].softmax(-1)
                proposal = next(one for one in position.drafter if one.token == token)
                assert proposal.q == pytest.approx(q[token].item(), rel=1e-3)
                assert proposal.rank == 1 + int((q > q[token]).sum())
            at += 1
    assert drafted >= 5


@pytest.mark.parametrize("rule", [Rule.DRAWN, Rule.BLOCK])
def test_the_coins_are_those_that_decided(rule: Rule) -> None:
    target, small = TableLM(12, 1, name="target"), TableLM(12, 2, name="small")
    rounds = steps(decode(target, [[1, 2]], ModelDrafter(small, rule=rule), sampler(1.0, 4), length=60, alternatives=3))
    fates = {step: {coin.node: (coin.number or 0.0) < coin.chance for coin in step.trials} for step in rounds}
    assert {fate for of_round in fates.values() for fate in of_round.values()} == {True, False}
    for step in rounds:
        assert all(coin.number is not None for coin in step.trials) or rule is Rule.BLOCK
        fell = {node for node, fate in fates[step].items() if fate}
        if rule is Rule.BLOCK:
            assert max(fell, default=-1) >= len(step.path) - 1
        else:
            assert fell >= {*step.path}
            assert not fell & {*step.rejected}
            for coin in (one for one in step.trials if one.node in step.path):
                index = step.path.index(coin.node)
                assert coin.chance == pytest.approx(min(1.0, step.target_p[index] / step.draft_p[index]), rel=1e-4)


@pytest.mark.parametrize("rule", [Rule.POINT, Rule.DRAWN, Rule.BLOCK])
def test_a_trial_has_the_probabilities_that_the_rule_compared(rule: Rule) -> None:
    """p and q after temperature and top-p, computed from the tables of the models."""
    target, small = TableLM(12, 1, name="target"), TableLM(12, 2, name="small")
    drafter: Drafter = PointDrafter(12, lambda row: int(target.logits([row])[0].argmax()))
    if rule is not Rule.POINT:
        drafter = ModelDrafter(small, rule=rule)
    rounds = steps(decode(target, [[1, 2]], drafter, sampler(0.7, 4, top_p=0.9), length=60, alternatives=3))

    def after_settings(model: TableLM, context: list[int]) -> list[float]:
        hot, order = (model.logits([context])[0] / 0.7).softmax(-1).sort(descending=True)
        kept = order[(hot.cumsum(-1) - hot) < 0.9]
        return [(hot[order == token] / hot[: len(kept)].sum()).item() if token in kept else 0.0 for token in range(12)]

    said, fates = [1, 2], set()
    for step in rounds:
        for trial in step.trials:
            before = [*said, *step.drafted[: trial.node]]
            p = after_settings(target, before)[step.drafted[trial.node]]
            q = after_settings(small, before)[step.drafted[trial.node]]
            assert trial.p == pytest.approx(p, rel=1e-5, abs=1e-9)
            assert trial.q == (None if rule is Rule.POINT else pytest.approx(q, rel=1e-5))
            if rule is not Rule.BLOCK:
                assert trial.chance == pytest.approx(p if rule is Rule.POINT else min(1, p / q), rel=1e-5, abs=1e-9)
            fates.add(trial.node in step.path)
        assert {trial.node for trial in step.trials} >= {*step.path, *step.rejected}
        said += step.emitted
    assert fates == {True, False}
    greedy = steps(decode(target, [[1, 2]], drafter, sampler(), length=20, alternatives=3))
    assert all((trial.p, trial.q) == (None, None) for step in greedy for trial in step.trials if rule is Rule.POINT)


def test_a_refused_sibling_is_taken_off_before_the_next_is_compared() -> None:
    target, small = TableLM(12, 1, name="target"), TableLM(12, 2, name="small")
    rounds = steps(decode(target, [[1, 2]], TreeDrafter(small, [2, 1]), sampler(0.7, 4), length=60, alternatives=3))
    said, seconds = [1, 2], 0
    for step in rounds:
        first, second = ({trial.node: trial for trial in step.trials}.get(node) for node in (0, 1))
        if first is not None and second is not None and (first.number or 0.0) >= first.chance:
            p, q = ((model.logits([said])[0] / 0.7).softmax(-1) for model in (target, small))
            left = (p - q).clamp(min=0)
            by_hand = (left / left.sum())[step.drafted[1]].item()
            assert second.p == pytest.approx(by_hand, rel=1e-4, abs=1e-9)
            assert second.chance == pytest.approx(min(1.0, by_hand / (second.q or 1.0)), rel=1e-4, abs=1e-9)
            seconds += 1
        said += step.emitted
    assert seconds


def test_a_draw_is_the_largest_of_log_probability_and_noise() -> None:
    for step in steps(
        decode(TableLM(12, 1, name="target"), [[1, 2]], None, sampler(1.0, 4), length=20, alternatives=12)
    ):
        assert max(step.positions[0].target, key=lambda one: math.log(one.processed) + one.noise).token == step.token


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", [ModelDrafter(TableLM(12, 2)), PointDrafter(12, lambda row: (row[-1] + 1) % 12)])
def test_a_recorded_run_is_the_run_itself(temperature: float, drafter: Drafter) -> None:
    def run(alternatives: int) -> list[Step]:
        events = decode(
            TableLM(12, 1), [[1, 2]], drafter, sampler(temperature, 5), length=30, alternatives=alternatives
        )
        return [
            replace(step, calls=(), draft_s=0.0, verify_s=0.0, sample_s=0.0, overhead_s=0.0) for step in steps(events)
        ]

    recorded, plain = run(4), run(0)
    assert [replace(step, positions=(), trials=(), odds=()) for step in recorded] == plain
    assert all(len(step.positions) == len(step.emitted) for step in recorded)
    assert all(isinstance(position, Position) for step in recorded for position in step.positions)
    assert not any(step.positions or step.trials or step.odds for step in plain)
    for step in recorded:
        examined = [step.odds[node] for node in (*step.path, *step.rejected)]
        assert [odds.p for odds in examined] == pytest.approx(step.target_p)
        assert [odds.q for odds in examined] == pytest.approx(step.draft_p)
        assert len(step.odds) == len(step.drafted)


def test_a_row_of_a_batch_has_the_positions_and_coins_that_it_has_alone() -> None:
    def run(*prompts: list[int]) -> list[tuple[tuple[int, ...], tuple[Position, ...], tuple[Trial, ...]]]:
        events = decode(
            TableLM(12, 1), [*prompts], ModelDrafter(TableLM(12, 2)), sampler(0.9, 5), length=12, alternatives=4
        )
        return [(step.emitted, step.positions, step.trials) for step in steps(events)]

    together, alone = run([1, 2], [7, 3, 4]), run([1, 2])
    assert [one[0] for one in together] == [one[0] for one in alone]
    for one, other in zip(together, alone, strict=True):
        assert [likely.token for at in one[1] for likely in at.target] == [
            likely.token for at in other[1] for likely in at.target
        ]
        assert [coin.node for coin in one[2]] == [coin.node for coin in other[2]]
        assert [coin.number for coin in one[2]] == [coin.number for coin in other[2]]
