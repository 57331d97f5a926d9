"""A target whose weights lie in several processes: rank 0's Network, and what the other ranks do for it.

Rank 0 decodes with :class:`ShardedNetwork` as with any other; each pass is told to the others, which run it on their
own part with a cache of their own (:func:`serve`). What happens to a cache between two passes is told with the next
one, so a round costs one message. Knows no sessions, no sampling and no text; how the ranks speak is
utils/distributed/process_group.py's.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sampling.models.cache import Buffer, SlotCache
from sampling.models.network import TransformersNetwork
from sampling.types import Hidden, KVCache
from utils.distributed.process_group import LEAVE, ProcessGroup
from utils.errors import UserError

Note = tuple[str, int, tuple[Any, ...]]
"""(what happened, to the cache of which number, with what)"""


class ShardedNetwork(TransformersNetwork):
    """Rank 0's part of a target, which stands for the whole.

    Args:
        model: this rank's part, a transformers model that `from_pretrained` has sharded.
        team: all ranks, each of which has loaded its part under `number`.
    """

    def __init__(self, model: Any, team: ProcessGroup, number: int) -> None:
        super().__init__(model)
        self.team, self.number = team, number
        self.generation_config = model.generation_config
        self.notes: deque[Note] = deque()
        self._caches = itertools.count()
        # The others' part goes with ours. No message may be sent from a finalizer: it can run at any moment.
        weakref.finalize(self, _forgotten.append, number)

    def new_cache(self, rows: int) -> ShardedCache:
        return ShardedCache(self, self.layers)

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`sampling.types.Network`; every rank runs the pass."""
        assert isinstance(cache, ShardedCache)
        fed = [None if one is None else one.cpu() for one in (ids, positions, mask)]
        with self.order("forward", cache.number, *fed, keep):
            return super().forward(ids, positions, mask, cache, keep, hidden)

    def order(self, verb: str, *details: Any) -> Any:
        """All ranks do `verb`, after what has happened to the caches since the last order."""
        notes = [self.notes.popleft() for _ in range(len(self.notes))]
        forgotten = [_forgotten.popleft() for _ in range(len(_forgotten))]
        return self.team.order(verb, self.number, forgotten, notes, *details)

    # -- what drafters take from a target's model ----------------------------------------------

    def get_input_embeddings(self) -> SimpleNamespace:
        return self._whole("get_input_embeddings")

    def get_output_embeddings(self) -> SimpleNamespace:
        return self._whole("get_output_embeddings")

    def _whole(self, name: str) -> SimpleNamespace:
        """What has the whole `weight` [V, H], collected from all ranks."""
        with self.order("weight", name):
            return SimpleNamespace(weight=nn.Parameter(whole_weight(self.model, name), requires_grad=False))


_forgotten: deque[int] = deque()


class ShardedCache(SlotCache):
    """Rank 0's part of a cache. What happens to it is noted for the others; a layer is read with all its heads."""

    def __init__(self, network: ShardedNetwork, layers: int) -> None:
        super().__init__(layers)
        self.network, self.number = network, next(network._caches)
        self._read: dict[int, tuple[Buffer, Buffer]] = {}  # K, V of layers that were read, all heads
        self._note("new", layers)
        weakref.finalize(self, network.notes.append, ("drop", self.number, ()))

    def _note(self, what: str, *details: Any) -> None:
        self.network.notes.append((what, self.number, details))

    def crop(self, length: int) -> None:
        if length < self.length:
            self._note("crop", length)
        super().crop(length)
        self._keep_read(length)

    def shift(self, moves: Tensor, length: int) -> None:
        self._note("shift", moves.cpu(), length)
        super().shift(moves, length)
        self._keep_read(min([length, *moves[2].tolist()]))

    def select(self, rows: Tensor) -> None:
        self._note("select", rows.cpu())
        super().select(rows)
        self._read.clear()

    def fork(self) -> ShardedCache:
        twin = ShardedCache(self.network, 0)
        twin.keys, twin.values = ([one.fork() for one in held] for held in (self.keys, self.values))
        self._note("fork", twin.number)
        return twin

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K, V [B, H_kv, length, D] of all heads; slots that were read before are not sent again."""
        known = self._read.setdefault(index, (Buffer(), Buffer()))
        start = known[0].length
        if start < self.length:
            with self.network.order("layer", self.number, index, start):
                new = [all_heads(one, self.network.config) for one in _slots(self, index, start)]
            for buffer, fresh in zip(known, new, strict=True):
                buffer.append(fresh)
        return known[0].view(), known[1].view()

    def _keep_read(self, length: int) -> None:
        for buffer in itertools.chain(*self._read.values()):
            buffer.crop(length)


def _slots(cache: SlotCache, index: int, start: int) -> tuple[Tensor, Tensor]:
    key, value = SlotCache.layer(cache, index)
    return key[:, :, start:], value[:, :, start:]


def all_heads(part: Tensor, config: Any) -> Tensor:
    """This rank's heads [B, h, T, D] → on rank 0 those of all ranks [B, H_kv, T, D], bit for bit; every rank calls it.

    Transformers deals heads out in order: rank 0 has the first ones.
    """
    whole = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if part.shape[1] == whole:
        return part
    if part.shape[1] * dist.get_world_size() != whole:
        raise UserError(f"the keys of this target are not shared by heads ({part.shape[1]} here, {whole} in all)")
    bits = part.contiguous().view(torch.uint8)
    parts = [torch.empty_like(bits) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(bits, parts, dst=0)
    return part if parts is None else torch.cat([one.view(part.dtype) for one in parts], dim=1)


def whole_weight(model: Any, name: str) -> Tensor:
    """The weight of the module that `model.NAME()` yields, whole on every rank; every rank calls it."""
    weight: Any = getattr(model, name)().weight
    return cast(Tensor, weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()


class _Shards:
    """What a rank that serves holds: parts of targets and of their caches, under rank 0's numbers."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self.networks: dict[int, TransformersNetwork] = {}
        self.caches: dict[tuple[int, int], SlotCache] = {}

    def obey(self, verb: str, number: int, *details: Any) -> None:
        if verb == "load":
            self.networks[number] = TransformersNetwork(self._load(*details))
            return
        forgotten, notes, *rest = details
        for gone in forgotten:
            self.networks.pop(gone, None)
            self.caches = {key: cache for key, cache in self.caches.items() if key[0] != gone}
        for what, cache, changes in notes:
            self._happened(what, (number, cache), *changes)
        network = self.networks[number]
        match verb, *rest:
            case "forward", cache, *fed, keep:
                here: list[Any] = [None if one is None else one.to(network.device) for one in fed]
                ids, positions, mask = here
                network.forward(ids, positions, mask, self.caches[number, cache], keep)
            case "layer", cache, index, start:
                for one in _slots(self.caches[number, cache], index, start):
                    all_heads(one, network.config)
            case "weight", name:
                whole_weight(network.model, name)

    def _happened(self, what: str, key: tuple[int, int], *details: Any) -> None:
        match what:
            case "new":
                self.caches[key] = SlotCache(*details)
            case "fork":
                self.caches[key[0], details[0]] = self.caches[key].fork()
            case "drop":
                self.caches.pop(key, None)
            case "crop" | "shift" | "select":
                getattr(self.caches[key], what)(*details)


@torch.inference_mode()
def serve(team: ProcessGroup, load: Callable[..., Any]) -> None:
    """Do what rank 0 orders until it tells to leave. `load` makes this rank's part of a model from the order's details.

    Raises LostError when rank 0, or what it relies on, has gone.
    """
    shards = _Shards(load)
    while (message := team.hear())[0] != LEAVE:
        try:
            with team.in_step():
                shards.obey(*message)
        except UserError:
            if team.broken:
                raise  # else rank 0 has met the same and tells it
