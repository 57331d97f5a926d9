"""Models whose weights are packed: their linear maps, embeddings and experts replaced by layers in the kernels' layout.

A plain `nn.Linear` brings its weight into a kernel's layout on every call, which makes a pass over 4 or 8 tokens cost a
multiple of a pass over one. Packed weights are the only copy. Knows no models beyond "a module with layers".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn

from utils.kernels.bindings import GROUP, load
from utils.kernels.quantized_linear import FLOAT_KINDS, PackedWeight, put_weights

_PLAIN, _GATED = "DenseActDense", "DenseGatedActDense"  # after the family: T5, MT5, UMT5 …


def packable(module: nn.Module) -> bool:
    """Whether `module` is an `nn.Linear` of floats on the CPU, no subclass and without hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
    return type(module) is nn.Linear and not hooked and _is_float(module.weight)


def _is_float(weight: Tensor) -> bool:
    return weight.dtype in FLOAT_KINDS and weight.device.type == "cpu" and weight.numel() > 0


def _weights(model: nn.Module, tables: bool, step: int) -> Iterator[dict[str, Tensor]]:
    """Groups of weights to pack, by name, whose rows are a multiple of `step` numbers."""
    for name, part in list(model.named_modules(remove_duplicate=False)):
        whole: Any = part
        is_table = type(part) is nn.Embedding or hasattr(part, "scalar_embed_scale")
        weights = {}
        if packable(part) or (tables and is_table and _is_float(whole.weight)):
            weights = {name: whole.weight}
        elif tables and isinstance(getattr(part, "gate_up_proj", None), nn.Parameter):
            weights = {f"{name}.{own}": getattr(part, own) for own in ("gate_up_proj", "down_proj")}
        if weights and all(weight.shape[-1] % step == 0 for weight in weights.values()):
            yield weights


def _pack(model: nn.Module, make: Callable[[Tensor, bool], PackedWeight], tables: bool, step: int = 1) -> int:
    """Replace layers in turn, so that each dense weight is freed at once; how many weights were packed."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = [list(weights) for weights in _weights(model, tables, step)]
    packed: dict[int, PackedWeight] = {}
    for group in names:
        chosen = {}
        for name in group:
            parent, _, own = name.rpartition(".")
            part = getattr(model.get_submodule(parent), own)
            weight = getattr(part, "weight", part)
            if id(weight) not in packed:
                packed[id(weight)] = make(weight, part is head or isinstance(part, nn.Embedding))
            chosen[name] = packed[id(weight)]
        del part, weight
        put_weights(model, chosen)
    return len(packed)


def pack(model: nn.Module, tables: bool = False) -> int:
    """Replace every `nn.Linear` of floats on the CPU inside `model`, with `tables` embeddings and experts too, by
    layers over the same numbers; how many weights were packed.

    In place, and final: the model can no longer be trained. Dense weights are freed unless something else holds them,
    as an embedding that stays holds the weight of a tied head. Without kernels it does nothing.
    """
    return _pack(model, lambda weight, _: PackedWeight.floats(weight), tables) if load() else 0


def quantize(model: nn.Module, kind: str, tables: bool) -> None:
    """Replace the same layers by layers over weights that are rounded to `kind`.

    Rows that are no multiple of 32 stay as they are. ValueError: `PackedWeight.rounded`.
    """
    _pack(model, lambda weight, outside: PackedWeight.rounded(weight, "q8" if outside else kind), tables, GROUP)


def unpacked_copy(model: nn.Module) -> nn.Module:
    """The plain model of a packed one: its packed layers are plain again, everything else is shared.

    `model` itself if nothing in it is packed.
    """
    whole: Any = model
    if hasattr(whole, "unpacked"):
        return cast(nn.Module, whole.unpacked())
    packed: list[Any] = [module for module in model.modules() if hasattr(module, "unpacked")]
    if not packed:
        return model
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo | {id(module): module.unpacked() for module in packed})


def lean(model: nn.Module) -> int:
    """Let the feed-forward layers of a packed T5 compute without a look at their weights; how many do.

    transformers' own compare the last weight's type with their input's, for which a packed layer would unpack it at
    every pass. Here both are float32.
    """
    count = 0
    for part in model.modules():
        known = type(part).__module__.startswith("transformers.") and type(part).__name__.endswith((_PLAIN, _GATED))
        if known and hasattr(part.wo, "unpacked"):
            part.forward = MethodType(_gated if hasattr(part, "wi_0") else _plain, part)
            count += 1
    return count


def _plain(dense: Any, x: Tensor) -> Tensor:
    return cast(Tensor, dense.wo(dense.act(dense.wi(x))))


def _gated(dense: Any, x: Tensor) -> Tensor:
    return cast(Tensor, dense.wo(dense.act(dense.wi_0(x)) * dense.wi_1(x)))
