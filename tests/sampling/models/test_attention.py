"""Attention of many rows, one token each, is what torch's own attention gives, whatever is hidden and shared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.models.llama import attention

ROWS, HEADS, SIZE, SLOTS = 20, 6, 16, 50


def inputs(shared: int, rows: int = ROWS, new: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, keys and values as a layer has them: q turned from [B, T, heads, D], keys a part of a longer cache."""
    torch.manual_seed(1)
    q = torch.randn(rows, new, HEADS + shared, SIZE, dtype=dtype).transpose(1, 2)[:, :HEADS]
    keys, values = (torch.randn(rows + 3, shared, SLOTS + 30, SIZE, dtype=dtype)[:rows, :, :SLOTS] for _ in range(2))
    return q, keys, values


def hidden(rows: int = ROWS) -> Tensor:
    """Row i sees its first i + 1 slots."""
    unseen = torch.arange(SLOTS)[None] > torch.arange(rows)[:, None]
    return torch.zeros(rows, SLOTS).masked_fill_(unseen, torch.finfo(torch.float32).min)[:, None, None]


@pytest.mark.parametrize("shared", [1, 2, 6])
@pytest.mark.parametrize("bias", [None, hidden(), hidden()[3:4], hidden().where(hidden() == 0, -torch.inf)])
def test_many_rows_of_one_token_are_what_torch_gives(shared: int, bias: Tensor | None) -> None:
    q, keys, values = inputs(shared)
    before = q.clone()
    own = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=0.3, enable_gqa=True)
    found = attention(q, keys, values, bias, 0.3)
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-6)
    assert found.shape == own.shape
    assert q.equal(before)
