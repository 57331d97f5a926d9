"""What the target computes on texts is computed once, whichever students learn from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sampling.models.causal import CausalLM
from sampling.models.llama import LlamaNetwork
from tests.support.students import make_target, text
from tests.support.tiny import VOCAB, tiny_model, tiny_tokenizer
from training.draft_heads.features import SHARD, Keeper, extract, load_shard
from training.tables.build import Passage
from training.text.dialogues import GivenPrompts
from training.text.synthesize import TextWriter, read_texts, write_self

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


def test_students_that_read_fewer_layers_take_the_same_files(network: Counting, tmp_path: Path) -> None:
    made = extract(network, FACTS, TEXTS, [1, 2], tmp_path, quietly)
    passes = network.passes
    assert len(made) == 2
    assert passes >= 2
    for layers in ([2], [1], [], [2, 1]):
        assert extract(network, FACTS, TEXTS, layers, tmp_path, quietly) == made
    assert network.passes == passes
    assert extract(network, FACTS, TEXTS, [0, 2], tmp_path, quietly) != made  # layer 0 is in none of them
    assert network.passes == 2 * passes


def test_other_texts_and_other_prompts_have_files_of_their_own(network: Counting, tmp_path: Path) -> None:
    made = extract(network, FACTS, TEXTS, [], tmp_path, quietly)
    shorter = [Passage(one.ids, 2) for one in TEXTS]
    assert not set(extract(network, FACTS, shorter, [], tmp_path, quietly)) & set(made)
    more = extract(network, FACTS, [*TEXTS[:SHARD], Passage(tuple(text(99, 8)))], [], tmp_path, quietly)
    assert more[0] == made[0]  # the first shard's texts are the same
    assert more[1] != made[1]


def test_another_target_has_files_of_its_own(network: Counting, tmp_path: Path) -> None:
    made = extract(network, FACTS, TEXTS, [], tmp_path, quietly)
    other = extract(network, {**FACTS, "weights": "b"}, TEXTS, [], tmp_path, quietly)
    assert not set(other) & set(made)
    assert extract(network, dict(reversed(FACTS.items())), TEXTS, [], tmp_path, quietly) == made


def test_a_layer_is_the_same_from_a_file_of_several(network: Counting, tmp_path: Path) -> None:
    several = extract(network, FACTS, TEXTS, [1, 2], tmp_path / "several", quietly)
    alone = extract(network, FACTS, TEXTS, [2], tmp_path / "alone", quietly)
    for one, other in zip(several, alone, strict=True):
        for ours, theirs in zip(load_shard(one), load_shard(other), strict=True):
            assert torch.equal(ours.hidden, theirs.hidden)
            assert all(torch.equal(*pair) for pair in zip(ours.kv[2], theirs.kv[2], strict=True))
            assert ours.start == theirs.start == 3


LONGEST = 84  # cuts some of the answers below


def write_states(folder: Path, model: Any, file: Path, tokens: int, before: int = 0) -> None:
    turns = [[f"{number} and {number * number}", "and then"] for number in range(SHARD)]
    source = GivenPrompts(tiny_tokenizer(), turns, 12, (0.0, 0.7), 120)
    keeper = Keeper(FACTS, folder, before, LONGEST)
    write_self(TextWriter(CausalLM(model), frozenset([2]), source, 3, 8, keeper), file, tokens, lambda count: None)


def test_states_kept_while_a_text_is_written_are_those_of_the_text_read_again(tmp_path: Path) -> None:
    model, file = tiny_model(), tmp_path / "text.jsonl"
    write_states(tmp_path / "kept", model, file, 900)
    texts = read_texts([file], VOCAB, LONGEST)
    kept = sorted((tmp_path / "kept").iterdir())
    assert len(kept) == len(texts) // SHARD >= 1
    assert any(len(text.ids) == LONGEST for text in texts)
    again = extract(LlamaNetwork(model), FACTS, texts, [], tmp_path / "again", quietly)
    assert {file.name for file in kept} == {file.name for file in again[: len(kept)]}
    for file in kept:
        for ours, theirs in zip(load_shard(file), load_shard(tmp_path / "again" / file.name), strict=True):
            assert torch.equal(ours.ids, theirs.ids)
            assert ours.start == theirs.start
            torch.testing.assert_close(ours.hidden.float(), theirs.hidden.float(), atol=0.05, rtol=0.05)


def test_a_text_that_is_written_on_keeps_the_states_of_whole_shards_alone(tmp_path: Path) -> None:
    model, file, folder = tiny_model(), tmp_path / "text.jsonl", tmp_path / "kept"
    write_states(folder, model, file, 300)
    before = len(read_texts([file], VOCAB, LONGEST))
    assert 0 < before < SHARD
    assert not folder.exists()
    write_states(folder, model, file, 1700, before)
    texts = read_texts([file], VOCAB, LONGEST)
    assert len(list(folder.iterdir())) == len(texts) // SHARD - 1 >= 1
    network = Counting(model)
    extract(network, FACTS, texts[SHARD : len(texts) // SHARD * SHARD], [], folder, quietly)
    assert network.passes == 0
