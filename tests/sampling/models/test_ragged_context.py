"""Rows near the end of a context beside shorter ones: positions that nobody uses stay inside it."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sampling.drafters.draft_model import ModelDrafter
from sampling.models.causal import CausalLM
from tests.support.runs import answers, greedy
from tests.support.toys import PointDrafter, TableLM

CONTEXT = 16


def test_learned_positions_are_not_asked_for_beyond_the_context() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8, n_positions=CONTEXT, n_embd=16, n_layer=1, n_head=2, eos_token_id=None)
    lm = CausalLM(GPT2LMHeadModel(config).eval())
    rows = [[1, 2, 3], [1, 2, 3, 4] * 3]
    together = answers(lm, rows, PointDrafter(8, lambda row: (row[-1] + 1) % 8), greedy(), length=20, gamma=6)
    assert together == [answers(lm, [row], None, greedy(), length=20)[0] for row in rows]
    assert [len(row) + len(new) for row, new in zip(rows, together, strict=True)] == [CONTEXT, CONTEXT]


def test_a_row_beyond_the_drafters_context_is_not_fed_to_it() -> None:
    """The toy refuses rows longer than its context."""
    target, small = TableLM(8, seed=1), TableLM(8, seed=2)
    small.context = 8
    rows = [[1, 2], [1, 2, 3, 4, 5, 6, 7]]
    assert answers(target, rows, ModelDrafter(small), greedy(), length=6, gamma=3) == [
        answers(target, [row], None, greedy(), length=6)[0] for row in rows
    ]
