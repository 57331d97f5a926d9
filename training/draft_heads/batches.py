"""Examples → padded batches, in an order that the seed and the epoch alone decide. Knows no loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.draft_heads.features import Example, in_batches


@dataclass(frozen=True)
class Batch:
    """B sequences of at most T tokens, padded on the right."""

    ids: Tensor  # [B, T] long
    hidden: Tensor  # [B, T, G]
    kv: list[tuple[Tensor, Tensor]]  # of each layer read: K, V [B, H_kv, T, D]
    weight: Tensor  # [B, T] what the target's distribution behind each token counts; 0 at padding
    read: Tensor | None = None  # [B, T, K·G] the states that an EAGLE-3 head reads

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        return int((self.weight > 0).sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.ids.to(device),
            self.hidden.to(device),
            [(key.to(device), value.to(device)) for key, value in self.kv],
            self.weight.to(device),
            None if self.read is None else self.read.to(device),
        )


def make_batch(examples: Sequence[Example], layers: Sequence[int], prompt_weight: float) -> Batch:
    """Pad and stack. What follows a token counts 1 where it was written, `prompt_weight` within a prompt."""
    width = max(len(example.ids) for example in examples)
    weight = torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        weight[row, : len(example.ids)] = prompt_weight
        weight[row, max(0, example.start - 1) : len(example.ids)] = 1.0

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        return pad_sequence(list(parts), batch_first=True)

    kv = [
        (
            stacked([example.kv[layer][0] for example in examples]).transpose(1, 2),
            stacked([example.kv[layer][1] for example in examples]).transpose(1, 2),
        )
        for layer in layers
    ]
    ids, hidden = [example.ids for example in examples], [example.hidden for example in examples]
    read = [example.read for example in examples if example.read is not None]
    return Batch(stacked(ids), stacked(hidden), kv, weight, stacked(read) if read else None)


def grouped(lengths: Sequence[int], tokens: int, seed: int) -> list[list[int]]:
    """Indices in batches of about `tokens` tokens, padding included: like lengths together, in shuffled order."""
    draw, order = random.Random(seed), list(range(len(lengths)))
    draw.shuffle(order)
    pool = 32  # batches' worth of sequences that are sorted by length among themselves
    several = max(1, pool * tokens // max(1, *lengths))
    batches: list[list[int]] = []
    for first in range(0, len(order), several):
        batches += in_batches(sorted(order[first : first + several], key=lengths.__getitem__), lengths, tokens)
    draw.shuffle(batches)
    return batches
