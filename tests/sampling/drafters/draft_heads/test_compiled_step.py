"""The compiled pass of a feature head equals `DraftHead.states` over the whole sequence, of the weights as rounded."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sampling.drafters.draft_heads.eagle import FeatureLM, FeatureSession
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.models.cache import Buffer, RowStates
from sampling.models.causal import CausalLM
from sampling.types import Draft
from tests.support.quantized import keep_code, needs_kernels
from tests.support.students import close, fed, make_student, make_target, spread_logits, text
from utils.kernels.quantized_linear import PackedWeight

pytestmark = needs_kernels

keep_code()
NOTHING, NEAR = Draft.empty(1), 5e-3  # keys and values lie in 16 bits


def pair(layers: int = 1, **changes: Any) -> tuple[Any, DraftHead]:
    """A target and a feature head whose weights are numbers that 4 bits hold."""
    target = make_target(hidden_size=64)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2}
    head = make_student(
        "feature",
        target,
        list(range(0, 40, 2)),
        num_hidden_layers=layers,
        **(sizes | {"num_key_value_heads": 1} | changes),
    )
    for part in head.modules():
        if isinstance(part, nn.Linear):
            part.weight.copy_(PackedWeight.rounded(part.weight, "q4").dense())
    head.rounded = True
    return target, head


def session_of(head: DraftHead, target: Any, row: list[int], held: int) -> FeatureSession:
    lm = FeatureLM(head, "feature")
    assert lm.network.compiled is not None
    found = lm.open([row], target=fed(target, [row], [held], hidden=lm.reads))
    assert isinstance(found, FeatureSession)
    return found


def wanted(head: DraftHead, target: Any, row: list[int], step: int = 0) -> Tensor:
    """[V] logits behind the row, its last `step` tokens without the target's states, from the whole sequence."""
    states = CausalLM(target).open([row], hidden=head.config.reads or True)
    states.score([row], NOTHING)
    made = head.states(torch.tensor([row]), states.hidden()[:, : len(row)], steps=step + 1)
    return spread_logits(head, made[step])[0, -1]


SEVERAL = {"reads": (-1, 0, 2)}


@pytest.mark.parametrize("reads", [{}, SEVERAL], ids=["last", "several"])
@pytest.mark.parametrize("layers", [1, 2])
def test_one_row_in_pieces_equals_the_whole(layers: int, reads: dict[str, Any]) -> None:
    target, head = pair(layers, **reads)
    row = text(3, 30)
    session = session_of(head, target, row, 1)
    for end in (9, 10, 11, 27, 30):
        session.target.score([row[: end - 1]], NOTHING)
        close(session.score([row[:end]], NOTHING)[0, 0], wanted(head, target, row[:end]), NEAR)


@pytest.mark.parametrize("reads", [{}, SEVERAL], ids=["last", "several"])
def test_a_row_ahead_of_its_target_goes_on_from_its_own_states(reads: dict[str, Any]) -> None:
    target, head = pair(**reads)
    row = text(4, 14)
    session = session_of(head, target, row, 11)
    for ahead in (0, 1, 2):
        close(session.score([row[: 12 + ahead]], NOTHING)[0, 0], wanted(head, target, row[: 12 + ahead], ahead), NEAR)
    session.target.score([row[:13]], NOTHING)  # the target has moved: drafted positions are computed anew
    close(session.score([row], NOTHING)[0, 0], wanted(head, target, row), NEAR)


@pytest.mark.parametrize("reads", [{}, SEVERAL], ids=["last", "several"])
def test_a_chain_of_a_tree_equals_the_row_and_rows_of_a_batch_each_alone(reads: dict[str, Any]) -> None:
    target, head = pair(**reads)
    row = text(5, 12)
    session = session_of(head, target, row, 11)
    session.score([row], NOTHING)
    beside = session.grow([7, 9], [-1, -1])
    for place, token in enumerate([7, 9]):
        alone = session_of(head, target, row, 11)
        alone.score([row], NOTHING)
        close(beside[place], alone.score_reduced([[*row, token]], NOTHING)[0, 0], NEAR)
    below = session.grow([7, 9, 8], [-1, -1, 1])
    alone = session_of(head, target, row, 11)
    for end in (12, 13):
        alone.score([[*row, 9, 8][:end]], NOTHING)
    close(below[0], alone.score_reduced([[*row, 9, 8]], NOTHING)[0, 0], NEAR)
    rows = [text(6, 9), text(7, 4)]
    lm = FeatureLM(head, "feature")
    both = lm.open(rows, target=fed(target, rows, [8, 3], hidden=lm.reads))
    for got, one in zip(both.score(rows, Draft.empty(2))[:, 0], rows, strict=True):
        close(got, wanted(head, target, one), NEAR)


def test_states_of_sixteen_bits_are_read_as_what_they_are() -> None:
    """One row told as numbers, beside rows told as tensors."""
    target, head = pair()
    target, row = target.bfloat16(), text(10, 30)
    session = session_of(head, target, row, 29)
    both = FeatureLM(head, "feature").open([row, row], target=fed(target, [row, row], [29, 29], hidden=True))
    expected = both.score([row, row], Draft.empty(2))[0, 0]
    close(session.score([row[:9]], NOTHING)[0, 0], both.score([row[:9], row[:9]], Draft.empty(2))[0, 0], NEAR)
    close(session.score([row], NOTHING)[0, 0], expected, NEAR)


def test_what_lies_beyond_the_window_is_not_looked_at() -> None:
    _, head = pair(window=32)
    step, states = FeatureLM(head, "feature").network.compiled, torch.randn(120, 64)

    def last(tokens: list[int]) -> Tensor:
        cache, own = step.new_cache(), Buffer()
        for first, end in ((0, 60), (60, 119), (119, 120)):
            logits = step.of_one_row(tokens[first:end], first, RowStates.of(states), 120, own, cache)
        return logits

    row = text(8, 120)
    assert torch.equal(last([*text(9, 80), *row[80:]]), last(row))
    assert not torch.equal(last([*row[:90], *text(9, 29), row[119]]), last(row))
