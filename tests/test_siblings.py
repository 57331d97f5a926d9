"""Siblings of a chain against a slow way of finding them: one by one, the whole law made anew for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sampling.drafters.drawing import Column, Drawing
from sampling.drafters.expand import Expansion, siblings_of
from sampling.events import Call
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Rows
from utils.logits_processors import make_processor

IDS = [2, 3, 5, 6, 7, 8, 11, 12, 13, 17]  # a short list of 20
Leaf = tuple[int, int, int, float]  # row, parent, token, raw


def slow(columns: list[Column], lengths: list[int], nodes: int, ids: list[int] | None) -> list[Leaf]:
    """The siblings of point masses, by depth and in their order; row b's chain has lengths[b] tokens."""
    laws = [column.logits.double().softmax(dim=-1) for column in columns]
    found: list[Leaf] = []
    for row, length in enumerate(lengths):
        taken: list[tuple[float, int, int, float]] = []
        reach = 1.0
        for depth in range(length):
            law, token = laws[depth][row], int(columns[depth].tokens[row])
            at, left = token if ids is None else ids.index(token), law.clone()
            for _ in range(siblings_of(float(law.max().float()))):
                left[at] = 0.0
                if float(left.sum()) <= 0:
                    break
                left = left / left.sum()
                at = int(left.argmax())
                taken.append((reach * float(law[at]), depth, at if ids is None else ids[at], float(law[at])))
            reach *= float(law[token if ids is None else ids.index(token)])
        kept = sorted(taken, key=lambda one: (-one[0], -one[1]))[: max(0, nodes - length)]
        found += [(row, one[1] - 1, one[2], one[3]) for one in taken if one in kept]
    return found


def fast(draft: Draft, depth: int) -> list[Leaf]:
    parents = list(range(-1, depth - 1)) if draft.parents is None else draft.parents.tolist()
    assert draft.raw is not None
    leaves = [
        (row, parents[node], token, draft.raw[row, node].item())
        for row, tokens in enumerate(draft.tokens.tolist())
        for node, token in enumerate(tokens)
        if node >= depth and token >= 0
    ]
    return sorted(leaves, key=lambda leaf: leaf[:2])  # the order of siblings is kept


def logits_of(noise: torch.Generator, rows: int, kind: str, size: int) -> Tensor:
    """Every figure apart, a few figures only (many ties), or ids without mass."""
    if kind == "ties":
        return torch.randint(0, 3, (rows, size), generator=noise).float()
    found = 2.0 * torch.randn(rows, size, generator=noise)
    if kind == "holes":
        found[torch.rand(rows, size, generator=noise) < 0.7] = float("-inf")
        found[:, 0] = 0.0
    return found


@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["apart", "ties", "holes"]),
    rows=st.integers(1, 4),
    short=st.booleans(),
    nodes=st.integers(1, 30),
    coupling=st.sampled_from(["greedy", "gumbel"]),
)
@settings(max_examples=150, deadline=None)
def test_one_look_finds_the_siblings_that_one_by_one_finds(
    seed: int, kind: str, rows: int, short: bool, nodes: int, coupling: str
) -> None:
    """The same tokens, parents and probabilities, whatever the noise draws for the chain itself."""
    noise = torch.Generator().manual_seed(seed)
    ids, vocab = (IDS, 20) if short else (None, 10)
    sampler = KeyedSampler(make_processor(0.0 if coupling == "greedy" else 1.0), seed, coupling="gumbel")
    drawing = Drawing(sampler.drafting(), list(range(rows)), vocab, torch.tensor(ids) if ids else None)
    assert drawing.sampler.point_mass
    lengths = torch.randint(0, 4, (rows,), generator=noise).tolist()
    lengths[0] = max(1, lengths[0])
    texts: Rows = [[1] * (row + 1) for row in range(rows)]
    columns = [
        drawing.column(logits_of(noise, rows, kind, 10), texts, [length > depth for length in lengths])
        for depth in range(max(lengths))
    ]
    draft = Expansion(nodes).grow(drawing, columns, texts, Call("drafter", 1, 0.0))
    found, wanted = fast(draft, len(columns)), slow(columns, lengths, nodes, ids)
    assert [leaf[:3] for leaf in found] == [leaf[:3] for leaf in wanted]
    assert [leaf[3] for leaf in found] == pytest.approx([leaf[3] for leaf in wanted], abs=1e-6)


def test_ties_go_to_the_lower_id_wherever_they_are_cut() -> None:
    """Of 5,000 equal ids seven are kept: `topk` alone would take any."""
    logits = torch.zeros(1, 5_000)
    drawing: Any = Drawing(KeyedSampler(make_processor(0.0)).drafting(), [0], 5_000)
    column = drawing.column(logits, [[1]], [True])
    draft = Expansion().grow(drawing, [column], [[1]], Call("drafter", 1, 0.0))
    assert draft.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
