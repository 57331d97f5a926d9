"""Whether a transformers model computes the same in pieces as at once: tried on its small twin, once a configuration.

A network of a family that no test covers asks for this. Text in pieces with rollbacks must give the logits of a pass
without a cache, or the model is refused. Trees and ragged rows must give them too, or are left out. Knows no sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from sampling.models.cache import CrossCache
from sampling.models.masks import additive, places
from sampling.models.twin import WINDOW, small, twin, windows
from sampling.types import Network, Rows
from utils.errors import UserError

_CLOSE = 1e-3  # of the largest logit: float32 differs by 1e-5, a token seen too much or too little by 0.1
_PIECES = (5, 6, 14, 15, 21)  # where the passes over a text end, beyond the twin's windows too
_ROWS: Rows = [[(7 * at + 5 * at * at + row * 29) % 61 + 20 for at in range(_PIECES[-1])] for row in range(2)]
_WRONG = [33, 28, 41]
_SOURCES: Rows = [[30, 25, 30, 61, 1], [44, 61, 1]]  # what an encoder reads
_PARENTS = torch.tensor([-1, 0, 0, -1])
_PATHS = [[], [0], [0, 1], [0, 2], [3]]  # the nodes on the way to the row's end and to each node
_NODES = [[24, 31, 47, 52], [66, 39, 21, 58]]


def takes(model: Any, argument: str) -> bool:
    """Whether the model's pass has a parameter of this name."""
    return argument in inspect.signature(model.forward).parameters


@dataclass(frozen=True, slots=True)
class Exact:
    """The ways of a pass that give the right logits, beside a pass over the next tokens of one row."""

    batches: bool = True  # over rows of equal length
    masks: bool = True  # with a mask of ours: trees, ragged rows
    slots: int | None = None  # … of at most so many slots
    singly: bool = False  # … only if recurrent layers read one token at a time


_known: dict[str, Exact | str] = {}


def probe(model: Any, build: Callable[[Any, Exact], Network]) -> Exact:
    """The ways in which a `build` network of `model` gives the right logits. UserError if there is none."""
    reason = ""
    for narrow in (True, False):
        try:
            config = small(model.config, narrow)
            key = f"{type(model)} {model.config._attn_implementation} {windows(model.config)} {config.to_json_string()}"
            if key not in _known:
                _known[key] = _tried(model, twin(model, config), build)
        except Exception as error:  # configurations check themselves in many ways
            reason = reason or f"no small twin of its configuration can be tried ({' '.join(str(error).split())[:160]})"
            continue
        if isinstance(result := _known[key], Exact):
            return result
        reason = result
        break
    raise UserError(f"{type(model).__name__} is not supported: {reason}")


def _tried(model: Any, small: Any, build: Callable[[Any, Exact], Network]) -> Exact | str:
    """What holds for `model` as its twin shows, or why it cannot be used."""
    reason = ""
    from sampling.models.recurrent import recurrent_layers

    ways = [Exact(), Exact(batches=False)]
    if recurrent_layers(small.config.get_text_config(decoder=True)):
        ways = [Exact(batches=False, masks=False, singly=singly) for singly in (False, True)]
    for exact in ways:
        try:
            right = _in_pieces(small, build(small, exact), _ROWS if exact.batches else _ROWS[:1])
        except Exception as error:
            reason = reason or f"a pass with a cache ends in {type(error).__name__}"
            continue
        if right:
            return _with_limits(model, small, build, exact) if exact.masks else exact
        reason = "in pieces, with a cache that is cut back, it gives other logits than at once"
    return reason


def _with_limits(model: Any, small: Any, build: Callable[[Any, Exact], Network], exact: Exact) -> Exact:
    """`exact` with how far masks hold."""

    def holds(start: int) -> bool:
        try:
            return exact.batches and _with_masks(small, build(small, exact), start)
        except Exception:
            return False

    if holds(_PIECES[2]):
        return exact
    limits = windows(model.config)
    return replace(exact, slots=min(limits)) if limits and holds(WINDOW - 8) else replace(exact, masks=False)


@torch.inference_mode()
def _uncached(model: Any, texts: Rows, sources: list[int]) -> Tensor:
    """[B, T, V] logits of a pass without a cache over each text, beside the prompt of that number of an encoder."""
    if not model.config.is_encoder_decoder:
        ids = torch.tensor(texts)
        named = takes(model, "position_ids")  # `generate` passes them then
        own = {"position_ids": torch.arange(ids.shape[1])[None]} if named else {}
        return cast(Tensor, model(input_ids=ids, use_cache=False, **own).logits)
    each = [
        model(input_ids=torch.tensor([_SOURCES[at]]), decoder_input_ids=torch.tensor([text]), use_cache=False).logits
        for text, at in zip(texts, sources, strict=True)
    ]
    return torch.cat(each)


def _near(logits: Tensor, right: Tensor) -> bool:
    return bool((logits - right).abs().max() < _CLOSE * max(1.0, float(right.abs().max())))


@torch.inference_mode()
def _in_pieces(model: Any, network: Network, rows: Rows) -> bool:
    """Whether passes over pieces, each with a refused draft behind it, give the logits of single passes. Of a recurrent
    model the draft is half accepted, so that a part of it is read again."""
    cache, start, numbers = _cache(network, len(rows)), 0, list(range(len(rows)))
    right = _uncached(model, rows, numbers)
    for end in _PIECES:
        if not _near(_uncached(model, [row[:end] for row in rows], numbers)[:, -1], right[:, end - 1]):
            return False
        ids = torch.tensor([row[start:end] + _WRONG for row in rows])
        positions = torch.arange(start, end + len(_WRONG)).expand(len(rows), -1)
        logits, _ = network.forward(ids, positions, None, cache, ids.shape[1])
        if not _near(logits[:, : end - start], right[:, start:end]):
            return False
        start = cache.resume(end)
        cache.crop(start)
    return True


@torch.inference_mode()
def _with_masks(model: Any, network: Network, start: int) -> bool:
    """Whether two rows that go on with 1 and 3 tokens after `start`, and trees behind them, get the right logits."""
    cache, count = _cache(network, 2), len(_PARENTS)
    network.forward(torch.tensor(_ROWS)[:, :start], torch.arange(start).expand(2, -1), None, cache, 1)
    lengths = [start, start]
    for more in ([1, 3], [1, 1]):
        feed = [row[length : length + new] for row, length, new in zip(_ROWS, lengths, more, strict=True)]
        width, before = max(more), max(lengths)
        positions, seen = places(lengths, feed, _PARENTS, before, width, count)
        ids = [[0] * (width - len(new)) + new + nodes for new, nodes in zip(feed, _NODES, strict=True)]
        logits, _ = network.forward(torch.tensor(ids), positions, additive(seen, network), cache, count + 1)
        ends = [length + new for length, new in zip(lengths, more, strict=True)]
        texts = [
            row[:end] + [nodes[node] for node in path]
            for row, end, nodes in zip(_ROWS, ends, _NODES, strict=True)
            for path in _PATHS
        ]
        padded = [text + [1] * (max(ends) + 2 - len(text)) for text in texts]
        right = _uncached(model, padded, [number for number in range(2) for _ in _PATHS])
        behind = torch.stack([logits[len(text) - 1] for text, logits in zip(texts, right, strict=True)])
        if not _near(logits.flatten(0, 1), behind):
            return False
        cache.shift(torch.tensor([[0], [before + width - 1], [start]]), max(ends))
        lengths = ends
    return True


def _cache(network: Any, rows: int) -> Any:
    cache = network.new_cache(rows)
    if isinstance(cache, CrossCache):
        network.read(cache, _SOURCES[:rows])
    return cache
