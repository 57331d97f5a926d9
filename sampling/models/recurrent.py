"""Models with recurrent layers: a cache whose states can be rolled back, and passes that keep the states on the way.

Keys and values can be cut at any token; the state of a recurrent layer (Mamba, gated delta rule, short convolution)
depends on all tokens read. So each such layer reads a pass in two steps: the committed tokens, whose state is kept,
then the draft. If a part of the draft is rejected, the next pass starts from the kept state and reads the accepted
tokens again. A layer whose scan takes no state for several tokens reads them one by one. Knows no tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from sampling.models.cache import SlotCache, slot_layer
from sampling.types import Moves
from utils.objects import HfConfig, HfModel

EVERY = 256  # tokens after which the states are kept again
KEPT = 8  # the most states kept


def recurrent_layers(config: HfConfig) -> list[int]:
    """The layers that keep a state, by transformers' own cache for this configuration."""
    layers = DynamicCache(config=config).layers
    return [index for index, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]


class _SlotsAndState(LinearAttentionLayer):
    """A layer of both kinds: keys and values in the slots, and a state."""

    def __init__(self, slots: SlotCache, index: int, state: LinearAttentionLayer) -> None:
        vars(self).update(vars(state))
        self._attention = slot_layer()(slots, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_attention"], name)


CacheLayerMixin.register(_SlotsAndState)


class Point(NamedTuple):
    """The states of all recurrent layers after `length` tokens. `lasting`: after a pass without drafts; others may be
    dropped for a newer one."""

    length: int
    states: dict[int, LinearAttentionLayer]
    lasting: bool


def _copied(state: LinearAttentionLayer, rows: Tensor | None = None) -> LinearAttentionLayer:
    """An independent copy of a state, of `rows` alone if given."""
    twin = copy(state)
    for name, value in vars(state).items():
        if isinstance(value, dict):
            setattr(twin, name, {key: _of_rows(part, rows) for key, part in value.items()})
    return twin


def _of_rows(part: Any, rows: Tensor | None) -> Any:
    if not isinstance(part, Tensor):
        return part
    return part.clone() if rows is None else part[rows.to(part.device)]


class RecurrentCache(SlotCache):
    """Slots of the attention layers, and the states of the recurrent layers after all tokens fed.

    `crop` cuts the slots at once; `resume` takes the states back before the next pass.
    """

    def __init__(self, config: HfConfig) -> None:
        self._template = DynamicCache(config=config).layers
        super().__init__(len(self._template))
        self._cut, self._read = 0, 0  # tokens in the slots, and in the states
        self.states = self._fresh()  # by layer; a pass changes them
        self._points: list[Point] = []

    def _fresh(self) -> dict[int, LinearAttentionLayer]:
        return {
            index: LinearAttentionLayer(number_of_states=layer.number_of_states)
            for index, layer in enumerate(self._template)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
        }

    @property
    def length(self) -> int:
        return self._cut

    def layers(self) -> list[Any]:
        return [self._layer(index, layer) for index, layer in enumerate(self._template)]

    def _layer(self, index: int, template: Any) -> Any:
        if (state := self.states.get(index)) is not None:
            return _SlotsAndState(self, index, state) if isinstance(template, CacheLayerMixin) else state
        return slot_layer()(self, index) if isinstance(template, DynamicLayer) else template

    @contextmanager
    def reading(self, fed: int, drafted: int, singly: bool) -> Iterator[None]:
        running = _Pass(self, fed - drafted, singly)
        token = _running.set(running)
        try:
            yield
        finally:
            _running.reset(token)
        self._cut = self._read = self._cut + fed
        if drafted:
            self._keep(Point(self._cut - drafted, running.kept, False))
        elif fed > 1 or self._cut - (self._points[-1].length if self._points else 0) >= EVERY:
            self._keep(Point(self._cut, {index: _copied(state) for index, state in self.states.items()}, True))

    def _keep(self, point: Point) -> None:
        points = [known for known in self._points if known.length < point.length]
        if points and not points[-1].lasting:
            before = points[-2].length if len(points) > 1 else 0
            if points[-1].length - before < EVERY:
                points.pop()
        self._points = [*points, point][-KEPT:]

    def crop(self, length: int) -> None:
        super().crop(length)
        self._cut = min(self._cut, length)

    def resume(self, length: int) -> int:
        if length < self._read:
            self._points = [point for point in self._points if point.length <= length]
            newest = self._points[-1] if self._points else Point(0, self._fresh(), True)
            self.states = {index: _copied(state) for index, state in newest.states.items()}
            self._read = newest.length
        return self._read

    def shift(self, moves: Moves, length: int) -> None:
        super().shift(moves, length)
        self._cut = length

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.states = {index: _copied(state, rows) for index, state in self.states.items()}
        self._points = [
            point._replace(states={index: _copied(state, rows) for index, state in point.states.items()})
            for point in self._points
        ]

    def fork(self) -> Self:
        twin = super().fork()
        twin.states = {index: _copied(state) for index, state in self.states.items()}
        return twin


class _Pass:
    """A running pass: the steps in which its layers read, and the states kept after the committed tokens."""

    def __init__(self, cache: RecurrentCache, committed: int, singly: bool) -> None:
        self.cache, self.committed, self.singly = cache, committed, singly
        self.kept: dict[int, LinearAttentionLayer] = {}

    def ends(self, layer: int, width: int) -> list[int]:
        """Return the positions at which the steps of a layer end."""
        begun = all(self.cache.states[layer].has_previous_state.values())
        steps = range(1 if begun else self.committed, width) if self.singly else [self.committed]
        return sorted({*(end for end in steps if end < width), width})


_running: ContextVar[_Pass | None] = ContextVar("_running", default=None)


def _part(value: Any, width: int, start: int, end: int) -> Any:
    """The part of a layer's argument that belongs to the tokens from `start` to `end`."""
    if isinstance(value, tuple):
        return tuple(_part(each, width, start, end) for each in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == width:
        return value[:, start:end]
    return value[start:end] if isinstance(value, Tensor) and value.shape == (width,) else value


@cache
def _in_steps(kind: Any) -> type[nn.Module]:
    """A subclass of the recurrent layer `kind` that reads in steps while a pass of ours is running."""

    class InSteps(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            running, layer = _running.get(), self.layer_idx
            if running is None:
                return super().forward(*args, **kwargs)
            width = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).shape[1]
            outs = []
            for start, end in pairwise([0, *running.ends(layer, width)]):
                own = {name: _part(value, width, start, end) for name, value in kwargs.items()}
                outs.append(super().forward(*(_part(value, width, start, end) for value in args), **own))
                if end == running.committed and end < width:
                    running.kept[layer] = _copied(running.cache.states[layer])
            if isinstance(outs[0], Tensor):
                return torch.cat(outs, dim=1)
            return (torch.cat([out[0] for out in outs], dim=1), *outs[-1][1:])

    InSteps.__name__ = InSteps.__qualname__ = kind.__name__
    return InSteps


def _hold_time_steps(module: HfModel) -> None:
    """Hold a Mamba layer's time steps within their limits in passes over one token too, where transformers omits it
    (Nemotron-H, Zamba2): its scan over several tokens holds them, and both must give the same state."""
    low, high = getattr(module, "time_step_limit", None) or (0.0, torch.inf)
    if low <= 0 and high == torch.inf:
        return
    ends = torch.tensor([low, high]).expm1().log()  # softplus of these gives the limits

    def hold(_module: nn.Module, _args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        bias, heads = module.dt_bias.float(), module.num_heads
        steps = out[..., -heads:].float().clamp(*(end.to(bias.device) - bias for end in ends))
        return torch.cat((out[..., :-heads], steps.to(out.dtype)), dim=-1)

    module.in_proj.register_forward_hook(hold)


@torch.no_grad()
def keep_states(model: HfModel, cache: RecurrentCache, run: Callable[[], Tensor]) -> None:
    """Make the recurrent layers of `model` read in steps. `run` runs a pass into `cache`: the layers that leave a state
    there are recurrent. Its result is not used."""
    if getattr(model, "_reads_in_steps", False):
        return
    innermost: dict[int, nn.Module] = {}  # by layer, the innermost module that leaves a state

    def look(module: HfModel, *_: Any) -> None:
        layer = module.layer_idx
        state = cache.states.get(layer)
        if state is not None and layer not in innermost and any(state.has_previous_state.values()):
            innermost[layer] = module

    handles = [module.register_forward_hook(look) for module in model.modules() if hasattr(module, "layer_idx")]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    for module in innermost.values():
        _hold_time_steps(module)
        kind: Any = type(module)
        module.__class__ = _in_steps(kind)
    model._reads_in_steps = True
