"""What the target computes on texts is computed once, whichever students learn from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sampling.models.llama import LlamaNetwork
from tests.support.students import make_target, text
from training.draft_heads.features import SHARD, extract, load_shard
from training.tables.build import Passage

TEXTS = [Passage(tuple(text(seed, 9 + seed % 5)), 3) for seed in range(SHARD + 6)]  # two shards
FACTS = {"target": "large", "weights": "a"}


class Counting:
    """A network that counts its passes."""

    def __init__(self, model: Any = None) -> None:
        self._network = LlamaNetwork(model or make_target())
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def forward(self, *given: Any, **named: Any) -> Any:
        self.passes += 1
        return self._network.forward(*given, **named)


def quietly(words: str, share: float | None) -> None:
    pass


@pytest.fixture
def network() -> Counting:
    return Counting()


def test_students_that_read_the_same_layers_take_the_same_files(network: Counting, tmp_path: Path) -> None:
    made = extract(network, FACTS, TEXTS, [1, 2], tmp_path, quietly)
    passes = network.passes
    assert len(made) == 2
    assert passes >= 2
    assert extract(network, FACTS, TEXTS, [2, 1], tmp_path, quietly) == made
    assert network.passes == passes
    assert all(not {*extract(network, FACTS, TEXTS, layers, tmp_path, quietly)} & {*made} for layers in ([2], [0, 2]))
    assert network.passes == 3 * passes


def test_other_texts_and_other_prompts_have_files_of_their_own(network: Counting, tmp_path: Path) -> None:
    made = extract(network, FACTS, TEXTS, [], tmp_path, quietly)
    assert not set(extract(network, FACTS, [Passage(one.ids, 2) for one in TEXTS], [], tmp_path, quietly)) & set(made)
    more = extract(network, FACTS, [*TEXTS[:SHARD], Passage(tuple(text(99, 8)))], [], tmp_path, quietly)
    assert more[0] == made[0]  # the first shard's texts are the same
    assert more[1] != made[1]


def test_another_target_has_files_of_its_own(network: Counting, tmp_path: Path) -> None:
    made = extract(network, FACTS, TEXTS, [], tmp_path, quietly)
    assert not set(extract(network, {**FACTS, "weights": "b"}, TEXTS, [], tmp_path, quietly)) & set(made)
    assert extract(network, dict(reversed(FACTS.items())), TEXTS, [], tmp_path, quietly) == made


def test_a_layer_is_the_same_from_a_file_of_several(network: Counting, tmp_path: Path) -> None:
    several = extract(network, FACTS, TEXTS, [1, 2], tmp_path / "several", quietly)
    for one, other in zip(several, extract(network, FACTS, TEXTS, [2], tmp_path / "alone", quietly), strict=True):
        for ours, theirs in zip(load_shard(one), load_shard(other), strict=True):
            assert torch.equal(ours.hidden, theirs.hidden)
            assert all(torch.equal(*pair) for pair in zip(ours.kv[2], theirs.kv[2], strict=True))
            assert ours.start == theirs.start == 3
