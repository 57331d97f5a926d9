"""The outputs of a target on given texts: last hidden states, keys and values of chosen layers, states between layers;
and padded batches of them.

A draft head learns from these alone: the target's distribution is its head applied to the states. They are computed
once and kept in a folder, in shards of safetensors, resumable shard by shard; or, where they are too much to keep
(EAGLE-3's states are 10 GB for three million tokens), computed whenever they are taken. The order of batches depends on
the lengths, the tokens of a batch and the seed alone. Knows no draft heads and no loss.

Shapes: G is the target's hidden size, K the number of states between layers that are read, H_kv and D the target's
heads of keys and their size.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sampling.models.network import network_of
from training.tables.build import Passage
from utils.files import write_bytes
from utils.progress import Progress, never

SHARD = 64  # sequences a file
FED = 4096  # tokens a pass, padding included
KEPT = torch.bfloat16  # type of the states, keys and values that are kept
POOL = 32  # batches' worth of sequences that are sorted by length among themselves


@dataclass(frozen=True)
class Example:
    """One sequence of T tokens and the target's outputs on it. Positions run from 0."""

    ids: Tensor  # [T] long
    start: int  # the index of the answer's first token
    hidden: Tensor  # [T, G] the input of the target's head
    kv: dict[int, tuple[Tensor, Tensor]]  # layer → K, V [T, H_kv, D], rotated as in the target's cache
    read: Tensor | None = None  # [T, K·G] the states between layers that a head reads, beside each other


@dataclass(frozen=True)
class StoredExamples:
    """Examples that were computed before."""

    examples: Sequence[Example]

    @property
    def lengths(self) -> list[int]:
        return [len(example.ids) for example in self.examples]

    def take(self, chosen: Sequence[int]) -> list[Example]:
        return [self.examples[index] for index in chosen]


@dataclass(frozen=True)
class StreamedExamples:
    """Examples that `model` computes of `texts` whenever they are taken, with the states `reads`; none is kept."""

    model: Any
    texts: Sequence[Passage]
    reads: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(text.ids) for text in self.texts]

    def take(self, chosen: Sequence[int]) -> list[Example]:
        """Compute in passes of at most FED tokens (a longer text alone): the same passes for the same `chosen`, so that
        a resumed run sees the same examples."""
        lengths, examples = self.lengths, dict[int, Example]()
        for batch in in_batches(sorted(chosen, key=lengths.__getitem__), lengths, FED):
            outputs = _run(self.model, [self.texts[index] for index in batch], (), self.reads)
            for index, output in zip(batch, outputs, strict=True):
                width = output["hidden"].shape[-1] // (1 + len(self.reads))
                examples[index] = Example(
                    ids=output["ids"].long(),
                    start=self.texts[index].start,
                    hidden=output["hidden"][:, :width],
                    kv={},
                    read=output["hidden"][:, width:],
                )
        return [examples[index] for index in chosen]


# Examples by number: `lengths` are the tokens of each, `take` returns the chosen ones.
Examples = StoredExamples | StreamedExamples


def extract(
    model: Any,
    facts: Mapping[str, str],
    texts: Sequence[Passage],
    layers: Sequence[int],
    folder: Path,
    progress: Progress,
    interrupt: Callable[[], bool] = never,
    reads: tuple[int, ...] = (),
) -> list[Path]:
    """Run `model` over `texts`; return the shards' files, fewer than needed only when interrupted.

    `reads`: states between layers that are kept too. `facts` identify the model and all that changes its outputs. A
    shard of an earlier run is taken if it has the same facts, texts, layers and states: one folder serves draft heads
    of every kind and of several targets.
    Raises OSError where the disk is full; a shard appears whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for first in range(0, len(texts), SHARD):
        part = texts[first : first + SHARD]
        progress("running the target over the texts", first / len(texts))
        if interrupt():
            return files
        content = json.dumps([facts, [[text.ids, text.start] for text in part], sorted(layers), reads], sort_keys=True)
        digest = hashlib.sha256(content.encode("ascii")).hexdigest()[:16]
        files.append(folder / f"features-{digest}.safetensors")
        if not files[-1].is_file():
            write_bytes(files[-1], save(_shard(model, part, layers, reads)))
    return files


def _shard(model: Any, texts: Sequence[Passage], layers: Sequence[int], reads: tuple[int, ...]) -> dict[str, Tensor]:
    lengths, outputs = [len(text.ids) for text in texts], dict[int, dict[str, Tensor]]()
    for batch in in_batches(sorted(range(len(texts)), key=lengths.__getitem__), lengths, FED):
        outputs |= zip(batch, _run(model, [texts[index] for index in batch], layers, reads), strict=True)
    tensors = {name: torch.cat([outputs[index][name] for index in range(len(texts))]) for name in outputs[0]}
    return {**tensors, "length": torch.tensor(lengths), "start": torch.tensor([text.start for text in texts])}


@torch.no_grad()
def _run(
    model: Any, texts: Sequence[Passage], layers: Sequence[int], reads: tuple[int, ...] = ()
) -> list[dict[str, Tensor]]:
    """Run one pass. Padding follows the sequences, where causal attention does not see it.

    `hidden` are the last states, followed by those of `reads` (sampling.types.Hidden).
    """
    network = network_of(model)
    width = max(len(text.ids) for text in texts)
    ids = torch.tensor([[*text.ids, *[0] * (width - len(text.ids))] for text in texts], device=network.device)
    cache = network.new_cache(len(texts))
    positions = torch.arange(width, device=network.device).expand(len(texts), -1)
    _, hidden = network.forward(ids, positions, None, cache, 1, hidden=(-1, *reads))
    assert hidden is not None
    outputs = []
    for row, text in enumerate(texts):
        count = len(text.ids)
        output = {"ids": ids[row, :count].to("cpu", torch.int32), "hidden": _kept(hidden[row, :count])}
        for layer in layers:
            key, value = (_kept(part[row, :, :count].transpose(0, 1)) for part in cache.layer(layer))
            output |= {f"key.{layer}": key, f"value.{layer}": value}
        outputs.append(output)
    return outputs


def _kept(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", KEPT).contiguous()


def load_shard(file: Path, reads: tuple[int, ...] = ()) -> list[Example]:
    """Return the examples of one file, made with `reads`; tensors are read from the page cache, not copied at once."""
    with safe_open(str(file), framework="pt") as data:
        tensors = {name: data.get_tensor(name) for name in data.keys()}  # noqa: SIM118  # no mapping
    layers = sorted(int(name.partition(".")[2]) for name in tensors if name.startswith("key."))
    ends = tensors["length"].cumsum(0).tolist()
    width = tensors["hidden"].shape[-1] // (1 + len(reads))
    return [
        Example(
            ids=tensors["ids"][begin:end].long(),
            start=start,
            hidden=tensors["hidden"][begin:end, :width],
            kv={layer: (tensors[f"key.{layer}"][begin:end], tensors[f"value.{layer}"][begin:end]) for layer in layers},
            read=tensors["hidden"][begin:end, width:] if reads else None,
        )
        for begin, end, start in zip([0, *ends], ends, tensors["start"].tolist(), strict=False)
    ]


# -- batches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """B sequences of at most T tokens, padded on the right."""

    ids: Tensor  # [B, T] long
    hidden: Tensor  # [B, T, G] the inputs of the target's head
    kv: list[tuple[Tensor, Tensor]]  # of each layer read: K, V [B, H_kv, T, D]
    weight: Tensor  # [B, T] the weight of the target's distribution after each token; 0 at padding
    read: Tensor | None = None  # [B, T, K·G] the states between layers that the head reads

    @property
    def tokens(self) -> int:
        """The number of tokens with a weight."""
        return int((self.weight > 0).sum())

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            ids=self.ids.to(device),
            hidden=self.hidden.to(device),
            kv=[(key.to(device), value.to(device)) for key, value in self.kv],
            weight=self.weight.to(device),
            read=None if self.read is None else self.read.to(device),
        )


def make_batch(examples: Sequence[Example], layers: Sequence[int], prompt_weight: float) -> Batch:
    """Pad and stack. The target's distributions from the answer's first token on have weight 1, those before it
    `prompt_weight`."""
    weight = torch.zeros(len(examples), max(len(example.ids) for example in examples))
    for row, example in enumerate(examples):
        weight[row, : len(example.ids)] = prompt_weight
        weight[row, max(0, example.start - 1) : len(example.ids)] = 1.0

    stacked = partial(pad_sequence, batch_first=True)
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
    """Return indices in batches of about `tokens` tokens, padding included: similar lengths together, in shuffled
    order."""
    draw, order = random.Random(seed), list(range(len(lengths)))
    draw.shuffle(order)
    pool = max(1, POOL * tokens // max(1, *lengths))
    pools = (sorted(order[first : first + pool], key=lengths.__getitem__) for first in range(0, len(order), pool))
    batches = [batch for chosen in pools for batch in in_batches(chosen, lengths, tokens)]
    draw.shuffle(batches)
    return batches


def in_batches(order: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield indices in `order`, which has ascending lengths, in batches of at most `most` tokens when padded to the
    last of them; a longer item is a batch alone."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > most:
            yield batch
            batch = []
        batch.append(index)
    yield batch
