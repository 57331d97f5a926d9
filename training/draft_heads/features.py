"""What a target computes on given texts: last hidden states, keys and values of chosen layers, states between layers.

Everything a draft head learns from follows from them: the target's distribution is its head applied to the states.
Computed once, kept in shards of safetensors beside the checkpoint, resumable shard by shard; or, where it is too much
to keep (the states that EAGLE-3 reads are 10 GB of three million tokens), computed whenever it is asked for. Knows no
draft heads and no loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from sampling.models.network import network_of
from training.text.self_text import TextIds
from training.text.synthesize import KEPT
from utils.files import write_bytes
from utils.progress import Progress, never

SHARD = 64  # sequences a file
FED = 4096  # tokens a pass, padding included
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Example:
    """One sequence of T tokens and what the target makes of it. Positions run from 0."""

    ids: Tensor  # [T] long
    start: int  # the first token somebody wrote
    hidden: Tensor  # [T, H] what the target's head is applied to
    kv: dict[int, tuple[Tensor, Tensor]]  # layer → K, V [T, H_kv, D], rotated as in the target's cache
    read: Tensor | None = None  # [T, K·G] the states that an EAGLE-3 head reads, beside each other


class Examples(Protocol):
    """What is learned from, by number."""

    @property
    def lengths(self) -> list[int]: ...  # tokens of each
    def take(self, chosen: Sequence[int]) -> list[Example]: ...


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
    texts: Sequence[TextIds]
    reads: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(text.ids) for text in self.texts]

    def take(self, chosen: Sequence[int]) -> list[Example]:
        """In passes of at most FED tokens: the same ones for the same `chosen`, so a run that goes on sees no other."""
        lengths, made = self.lengths, dict[int, Example]()
        for batch in in_batches(sorted(chosen, key=lengths.__getitem__), lengths, FED):
            found = _run(self.model, [self.texts[at] for at in batch], (), self.reads)
            for index, one in zip(batch, found, strict=True):
                width = one["hidden"].shape[-1] // (1 + len(self.reads))
                last, read = one["hidden"][:, :width], one["hidden"][:, width:]
                made[index] = Example(one["ids"].long(), self.texts[index].start, last, {}, read)
        return [made[index] for index in chosen]


def extract(
    model: Any,
    facts: Mapping[str, str],
    texts: Sequence[TextIds],
    layers: Sequence[int],
    folder: Path,
    progress: Progress,
    interrupt: Callable[[], bool] = never,
    reads: tuple[int, ...] = (),
) -> list[Path]:
    """Run `model` over `texts`; the shards' files, fewer than needed only when interrupted.

    `reads`: states between layers that are wanted too. `facts` say which model it is, whatever changes what it computes
    among them. A shard of an earlier run is taken if it was made by the same one of the same texts and holds these
    layers, perhaps others too: one folder serves draft heads of every kind and of several targets.
    Raises OSError where the disk is full; a shard appears whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for first in range(0, len(texts), SHARD):
        part = texts[first : first + SHARD]
        progress("running the target over the texts", first / len(texts))
        if interrupt():
            return files
        mark = _mark({**facts, **({"reads": repr(reads)} if reads else {})}, part)
        file = _made(folder, mark, layers)
        if file is None:
            file = folder / f"{mark}{'-'.join(map(str, sorted(layers)))}{_SUFFIX}"
            write_bytes(file, save(_shard(model, part, layers, reads)))
        files.append(file)
    return files


class Keeper:
    """Keeps the states of texts while they are written, in the shards that :func:`extract` looks for.

    `before`: the sequences that the file of texts holds already; a shard that these begin is left to `extract`.
    """

    def __init__(self, facts: Mapping[str, str], folder: Path, before: int, longest: int) -> None:
        self._facts, self._folder, self._skipped, self._longest = facts, folder, -before % SHARD, longest
        self._texts: list[TextIds] = []
        self._states: list[Tensor] = []

    def __call__(self, ids: Sequence[int], start: int, states: Tensor) -> None:
        """Take the next line of the file and its states [T, H]. Raises OSError where the disk is full."""
        text = TextIds.cut(ids, start, self._longest)
        if text.teaches and self._skipped:
            self._skipped -= 1
        elif text.teaches:
            self._texts.append(text)
            self._states.append(states[: self._longest])
        if len(self._texts) == SHARD:
            every = [token for text in self._texts for token in text.ids]
            tensors = {"ids": torch.tensor(every, dtype=torch.int32), "hidden": _kept(torch.cat(self._states))}
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / f"{_mark(self._facts, self._texts)}{_SUFFIX}"
            write_bytes(file, save(tensors | _lengths(self._texts)))
            self._texts, self._states = [], []


def _mark(facts: Mapping[str, str], texts: Sequence[TextIds]) -> str:
    """How the name of a shard of these texts begins."""
    content = json.dumps([facts, [[text.ids, text.start] for text in texts]], sort_keys=True)
    return f"features-{hashlib.sha256(content.encode('ascii')).hexdigest()[:16]}-"


def _lengths(texts: Sequence[TextIds]) -> dict[str, Tensor]:
    """How long the sequences of a shard are and where their answers start."""
    lengths, starts = [len(text.ids) for text in texts], [text.start for text in texts]
    return {"length": torch.tensor(lengths), "start": torch.tensor(starts)}


def _made(folder: Path, mark: str, layers: Sequence[int]) -> Path | None:
    """A shard of this mark's model and texts that holds at least these layers."""
    for file in sorted(folder.glob(f"{mark}*{_SUFFIX}")):
        if set(map(str, layers)) <= set(file.name.removeprefix(mark).removesuffix(_SUFFIX).split("-")):
            return file
    return None


def _shard(model: Any, texts: Sequence[TextIds], layers: Sequence[int], reads: tuple[int, ...]) -> dict[str, Tensor]:
    lengths = [len(text.ids) for text in texts]
    made: dict[int, dict[str, Tensor]] = {}
    for batch in in_batches(sorted(range(len(texts)), key=lengths.__getitem__), lengths, FED):
        made |= zip(batch, _run(model, [texts[index] for index in batch], layers, reads), strict=True)
    tensors = {name: torch.cat([made[index][name] for index in range(len(texts))]) for name in made[0]}
    return tensors | _lengths(texts)


def in_batches(order: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices in `order`, as many at once as are `most` tokens when padded to the last of them."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > most:
            yield batch
            batch = []
        batch.append(index)
    yield batch


@torch.no_grad()
def _run(
    model: Any, texts: Sequence[TextIds], layers: Sequence[int], reads: tuple[int, ...] = ()
) -> list[dict[str, Tensor]]:
    """One pass; padding lies behind the sequences, where causal attention does not see it.

    `hidden` are the last states and behind them those of `reads` (sampling.types.Hidden).
    """
    network = network_of(model)
    width = max(len(text.ids) for text in texts)
    ids = torch.tensor([[*text.ids, *[0] * (width - len(text.ids))] for text in texts], device=network.device)
    cache = network.new_cache(len(texts))
    positions = torch.arange(width, device=network.device).expand(len(texts), -1)
    _, hidden = network.forward(ids, positions, None, cache, 1, hidden=(-1, *reads))
    assert hidden is not None
    found = []
    for row, text in enumerate(texts):
        count = len(text.ids)
        one = {"ids": ids[row, :count].to("cpu", torch.int32), "hidden": _kept(hidden[row, :count])}
        for layer in layers:
            key, value = cache.layer(layer)
            one[f"key.{layer}"] = _kept(key[row, :, :count].transpose(0, 1))
            one[f"value.{layer}"] = _kept(value[row, :, :count].transpose(0, 1))
        found.append(one)
    return found


def _kept(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", KEPT).contiguous()


def load_shard(file: Path, reads: tuple[int, ...] = ()) -> list[Example]:
    """The examples of one file, made with `reads`; tensors are read from the page cache, not copied at once."""
    with safe_open(str(file), framework="pt") as data:
        tensors = {name: data.get_tensor(name) for name in data.keys()}  # noqa: SIM118  # no mapping
    layers = sorted(int(name.partition(".")[2]) for name in tensors if name.startswith("key."))
    ends = tensors["length"].cumsum(0).tolist()
    width = tensors["hidden"].shape[-1] // (1 + len(reads))
    facts = zip([0, *ends], ends, tensors["start"].tolist(), strict=False)
    return [
        Example(
            ids=tensors["ids"][begin:end].long(),
            start=start,
            hidden=tensors["hidden"][begin:end, :width],
            kv={layer: (tensors[f"key.{layer}"][begin:end], tensors[f"value.{layer}"][begin:end]) for layer in layers},
            read=tensors["hidden"][begin:end, width:] if reads else None,
        )
        for begin, end, start in facts
    ]
