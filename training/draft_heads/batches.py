"""Examples → padded batches, in an order that the seed and the epoch alone decide. Knows no loss."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.draft_heads.features import Example


@dataclass(frozen=True)
class Batch:
    """B sequences of at most T tokens, padded on the right."""

    ids: Tensor  # [B, T] long
    hidden: Tensor  # [B, T, G]
    kv: list[tuple[Tensor, Tensor]]  # of each layer read: K, V [B, H_kv, T, D]
    weight: Tensor  # [B, T] what the law behind each token counts; 0 at padding

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
        )


def make_batch(examples: Sequence[Example], layers: Sequence[int], prompt_weight: float) -> Batch:
    """Pad and stack. The law behind a token counts 1 where it yields a written token, `prompt_weight` in a prompt."""
    width = max(len(example.ids) for example in examples)
    weight = torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        weight[row, : len(example.ids)] = prompt_weight
        weight[row, max(0, example.start - 1) : len(example.ids)] = 1.0
    return Batch(
        _stack([example.ids for example in examples], width),
        _stack([example.hidden for example in examples], width),
        [
            (
                _stack([example.kv[layer][0] for example in examples], width).transpose(1, 2),
                _stack([example.kv[layer][1] for example in examples], width).transpose(1, 2),
            )
            for layer in layers
        ],
        weight,
    )


def _stack(parts: Sequence[Tensor], width: int) -> Tensor:
    made = parts[0].new_zeros((len(parts), width, *parts[0].shape[1:]))
    for row, part in enumerate(parts):
        made[row, : len(part)] = part
    return made


def grouped(examples: Sequence[Example], tokens: int, seed: int) -> list[list[int]]:
    """Indices in batches of about `tokens` tokens, padding included: like lengths together, in shuffled order."""
    draw = random.Random(seed)
    order = list(range(len(examples)))
    draw.shuffle(order)
    pool = 32  # batches' worth of sequences that are sorted by length among themselves
    several = max(1, pool * tokens // max(1, max(len(example.ids) for example in examples)))
    batches = []
    for first in range(0, len(order), several):
        part = sorted(order[first : first + several], key=lambda index: len(examples[index].ids))
        batches += list(_cut(part, examples, tokens))
    draw.shuffle(batches)
    return batches


def _cut(order: Sequence[int], examples: Sequence[Example], tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * len(examples[index].ids) > tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch
