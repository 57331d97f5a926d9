"""Sessions over the compiled pass: whatever their history, the bits of a token's logits are those of a fresh one."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.models import fused
from sampling.models.causal import CausalLM
from sampling.models.fused import FusedCache, FusedNetwork
from sampling.types import Draft
from tests.sampling.models.test_fused import VOCAB, tokens
from tests.support.quantized import keep_code, needs_kernels, quantized_model

pytestmark = needs_kernels

keep_code()


@pytest.fixture(scope="module")
def model() -> Any:
    return quantized_model("llama, three queries a key")


def test_rounds_of_ragged_rows_move_nothing_and_give_each_rows_own_bits(model: Any, monkeypatch: Any) -> None:
    """Three rows that keep 0 to 2 drafts a round, the third silent now and then; over the cache's growth."""
    network = FusedNetwork(model)
    rows = [tokens(20, 1), tokens(11, 2), tokens(140, 3)]
    session = CausalLM(network).open(rows, hidden=(0, 1))
    session.score(rows, Draft.empty(3))
    moved: list[Tensor] = []
    monkeypatch.setattr(FusedCache, "shift", lambda self, moves, length: moved.append(moves))
    for turn in range(40):
        nodes = [tokens(2, 10 * turn + row) for row in range(3)]
        if turn % 3 == 0:
            nodes[2] = []
        found = session.score(rows, Draft.of(nodes))
        if turn % 8 == 0:
            for row, text in enumerate(rows):
                own = CausalLM(network).open([text])
                alone = own.score([text], Draft.of([nodes[row]]))[0]
                assert torch.equal(found[row, : len(nodes[row]) + 1], alone), (turn, row)
        kept = [(turn + row) % 3 if nodes[row] else 0 for row in range(3)]
        session.commit([list(range(count)) for count in kept])
        for row, (text, count) in enumerate(zip(rows, kept, strict=True)):
            text += [*nodes[row][:count], 100 + turn + row]
    assert not moved
    assert len({len(row) for row in rows}) == 3
    states, held = session.hidden(), session.held()
    keys, values, lengths = session.kv(1)
    assert lengths.tolist() == held
    for row, text in enumerate(rows):
        own = CausalLM(network).open([text], hidden=(0, 1))
        own.score([text], Draft.empty(1))
        count = held[row]
        assert torch.equal(states[row, :count], own.hidden()[0, :count])
        for mine, theirs in zip((keys, values), own.kv(1)[:2], strict=True):
            assert torch.equal(mine[row, :, :count], theirs[0, :, :count])


def test_a_step_of_ragged_rows_feeds_the_tokens_given(model: Any) -> None:
    rows, last = [tokens(3, 1), tokens(5, 2)], [tokens(1, 3)[0], tokens(1, 4)[0]]
    session = CausalLM(FusedNetwork(model)).open(rows)
    session.score(rows, Draft.empty(2))
    found = session.step(torch.tensor(last))
    for row, text in enumerate(rows):
        alone = CausalLM(FusedNetwork(model)).open([text])
        assert torch.equal(found[row], alone.score([[*text, last[row]]], Draft.empty(1))[0, -1])


def test_prompts_of_a_batch_are_read_without_padding(model: Any, monkeypatch: Any) -> None:
    network, forward = FusedNetwork(model), FusedNetwork.forward
    fed: list[tuple[int, ...]] = []

    def counted(self: FusedNetwork, ids: Tensor, *rest: Any) -> Any:
        fed.append(tuple(ids.shape))
        return forward(self, ids, *rest)

    monkeypatch.setattr(FusedNetwork, "forward", counted)
    rows = [tokens(20, 1), tokens(300, 2), tokens(20, 3), tokens(5, 4)]
    found = CausalLM(network).open(rows).score(rows, Draft.empty(4))
    assert sorted(fed) == [(1, 5), (1, 300), (2, 20)]
    for row, text in enumerate(rows):
        assert torch.equal(found[row], CausalLM(network).open([text]).score([text], Draft.empty(1))[0])


def drafted(chance: random.Random, rows: list[list[int]], trees: bool) -> tuple[Draft, list[list[int]]]:
    """A random draft behind the rows, a tree now and then, and a path of its nodes for each of them."""
    count = chance.randrange(7)
    nodes = [chance.choices(range(VOCAB), k=count) for _ in rows]
    parents = [chance.randrange(-1, node) if trees else node - 1 for node in range(count)]
    paths = []
    for _ in rows:
        node, path = chance.randrange(-1, count), list[int]()
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        paths.append(path)
    return Draft.of(nodes, parents=parents if trees else None), paths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2])
def test_whatever_a_session_went_through_its_logits_are_those_of_a_fresh_one(
    model: Any, monkeypatch: pytest.MonkeyPatch, count: int, seed: int
) -> None:
    """Score, commit, select, fork and go back in any order, while the cache grows and a batch shrinks to one row."""
    monkeypatch.setattr(fused, "GROW", 16)  # often, that is
    chance, lm = random.Random(10 * count + seed), CausalLM(FusedNetwork(model))
    rows = [tokens(chance.choice((3, 16, 17)), row) for row in range(count)]
    session = lm.open(rows, hidden=(0, -1))
    for turn in range(40):
        draft, paths = drafted(chance, rows, trees=chance.random() < 0.6)
        logits = session.score(rows, draft)
        row = chance.randrange(len(rows))
        assert torch.equal(logits[row], lm.open([rows[row]]).score([rows[row]], Draft(draft.trees[row : row + 1]))[0])
        session.commit(paths)
        for row, path in enumerate(paths):
            rows[row] = [*rows[row], *draft.trees[row].path_tokens(path), *tokens(1 + turn % 10, turn)]
        match chance.randrange(4):
            case 0:
                rows = [row[: len(row) - chance.randrange((len(row) + 5) // 6)] for row in rows]
            case 1 if turn > 1:
                stay = sorted(chance.sample(range(len(rows)), max(1, len(rows) - 1)))
                session.select(torch.tensor(stay))
                rows = [rows[row] for row in stay]
            case 2:
                session = chance.choice((session, session.fork()))


@pytest.mark.parametrize("order", [(1, 0, -1), (-1, 1), (1, -1, 0)])
def test_states_of_layers_come_in_the_order_in_which_they_are_wanted(model: Any, order: tuple[int, ...]) -> None:
    """A head reads them side by side, as its file lists them; of prompts, of one row and of several."""
    lm, rows = CausalLM(FusedNetwork(model)), [tokens(9, 1), tokens(6, 2)]
    for texts in (rows[:1], rows):
        session = lm.open(texts, hidden=order)
        session.score(texts, Draft.empty(len(texts)))
        for row, text in enumerate(texts):
            each = []
            for state in order:
                alone = lm.open([text], hidden=(state,))
                alone.score([text], Draft.empty(1))
                each.append(alone.hidden()[0])
            assert torch.equal(session.hidden()[row, : len(text)], torch.cat(each, dim=-1))
            assert torch.equal(session.hidden(order)[row, : len(text)], torch.cat(each, dim=-1))
