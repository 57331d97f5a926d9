"""Models whose weights are packed: their linear maps, embeddings and experts replaced by layers in the kernels' layout.

A plain `nn.Linear` brings its weight into a kernel's layout on every call, which makes a pass over 4 or 8 tokens cost a
multiple of a pass over one. Packed weights are the only copy. Knows no models beyond "a module with layers", and no
gradients: a packed layer works as torch's own where a gradient, another dtype or another device is asked for.

T5's feed-forward layers compare their last weight's type with their input's, for which a packed layer would unpack it
at every pass: :class:`LeanDense` does without that look, for in such a model both are float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from utils.kernels.bindings import GROUP, load
from utils.kernels.quantized_linear import FLOAT_KINDS, PackedWeight, put_weights

_PLAIN, _GATED = "DenseActDense", "DenseGatedActDense"  # behind the family: T5, MT5, UMT5 …


def packable(module: nn.Module) -> bool:
    """Whether `module` is an `nn.Linear` of floats on the CPU: no subclass (those own their layout), no hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
    return type(module) is nn.Linear and not hooked and _is_float(module.weight)


def _is_float(weight: Tensor) -> bool:
    return weight.dtype in FLOAT_KINDS and weight.device.type == "cpu" and weight.numel() > 0


def _weights(model: nn.Module, tables: bool, step: int) -> Iterator[dict[str, Tensor]]:
    """The weights that are packed together, by name, whose rows are a multiple of `step` numbers."""
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
    """Replace layers one after another, so that each dense weight goes at once; how many weights were packed."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = [list(weights) for weights in _weights(model, tables, step)]
    packed: dict[int, PackedWeight] = {}
    for together in names:
        chosen = {}
        for name in together:
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

    In place, and final: the model can no longer be trained. Dense weights are freed unless someone else holds them: a
    head tied to an embedding that stays is packed for itself. 0 without kernels (the model is left as it was).
    """
    return _pack(model, lambda weight, _: PackedWeight.floats(weight), tables) if load() else 0


def quantize(model: nn.Module, kind: str, tables: bool) -> None:
    """Round the weights of a model's plain linear maps to `kind` in the same way; with `tables` those of its embeddings
    and experts too. Rows of no whole groups of 32 stay as they are. ValueError: `PackedWeight.rounded`."""
    _pack(model, lambda weight, outside: PackedWeight.rounded(weight, "q8" if outside else kind), tables, GROUP)


def unpacked_copy(model: nn.Module) -> nn.Module:
    """A plain model to compare a packed one with: layers that can be unpacked are plain ones again.

    Everything else (norms, buffers) is shared with `model`, so only the packed weights take memory a second time.
    Returns `model` itself if nothing in it is packed.
    """
    whole: Any = model
    if hasattr(whole, "unpacked"):
        return cast(nn.Module, whole.unpacked())
    packed: list[Any] = [module for module in model.modules() if hasattr(module, "unpacked")]
    if not packed:
        return model
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo | {id(module): module.unpacked() for module in packed})


class LeanDense(nn.Module):
    """wo(act(wi(x))), or wo(act(wi_0(x)) · wi_1(x)) where `dense` is gated; uses its layers where they lie."""

    def __init__(self, dense: Any) -> None:
        super().__init__()
        self.gated = hasattr(dense, "wi_0")
        if self.gated:
            self.wi_0, self.wi_1 = dense.wi_0, dense.wi_1
        else:
            self.wi = dense.wi
        self.act, self.wo = dense.act, dense.wo

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.wi_0(x)) * self.wi_1(x) if self.gated else self.act(self.wi(x))
        return cast(Tensor, self.wo(inner))


def lean(model: nn.Module) -> int:
    """Replace the feed-forward layers of a packed T5 in place; how many were replaced. Same numbers, same names."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            kind = type(child)
            known = kind.__module__.startswith("transformers.") and kind.__name__.endswith((_PLAIN, _GATED))
            if known and child is not None and hasattr(getattr(child, "wo", None), "unpacked"):
                setattr(parent, name, LeanDense(child).train(child.training))
                count += 1
    return count
