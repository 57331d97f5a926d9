"""Linear layers whose float32 weights are laid out once for the CPU's matrix kernels.

A plain `nn.Linear` brings its weight into the kernel's layout on every call, which makes a pass
over 4 or 8 tokens cost a multiple of a pass over one. `PackedLinear` does it once (oneDNN, through
the operators the inductor uses when it freezes a graph), so that a pass over 8 tokens costs little
more than a pass over one. The packed weight is the only copy. Same numbers up to float32
rounding. Knows no models beyond "a module with `nn.Linear` children", and no gradients: where a
gradient, another dtype or another device is asked for, it unpacks its weight and works as `F.linear`.

T5's feed-forward layers compare their last weight's type with their input's, for which a packed layer, or a quantised
one, would unpack it at every pass: :class:`LeanDense` does without that look, for in such a model both are float32.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_HINT = 8  # token count that the layout is chosen for; 8 is as good as any at 1 … 256, a hint of 1 is not

_PLAIN, _GATED = "DenseActDense", "DenseGatedActDense"  # behind the family: T5, MT5, UMT5 …


def available() -> bool:
    """Whether this build of torch and this machine can pack float32 weights."""
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W [out, in] packed; x [..., in] → y [..., out].

    `weight` unpacks a fresh dense copy at every access (not a Parameter: writing to it changes nothing), and so does
    `state_dict`. To be copied it is unpacked first (`unpacked_copy`). `.to(...)` leaves the packed weight where it is;
    the bias follows.
    """

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack `weight` [out, in] (float32, CPU) and keep a copy of `bias` [out].

        Raises ValueError for another dtype or device, or where `available()` is False.
        """
        super().__init__()
        self._packed = _pack(weight)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @property
    def weight(self) -> Tensor:
        """A dense copy of the weight [out, in], unpacked again at every access."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        if not self._fits(x):
            return F.linear(x, self.weight.to(x), None if self.bias is None else self.bias.to(x))
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], ""))

    def unpacked(self) -> nn.Linear:
        """The plain layer with the same numbers; its weight is a dense copy without gradient."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear.train(self.training)

    def _fits(self, x: Tensor) -> bool:
        wants_gradient = torch.is_grad_enabled() and x.requires_grad
        return x.dtype == torch.float32 and x.device.type == "cpu" and not wants_gradient

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def packable(module: nn.Module) -> bool:
    """Whether `module` is a float32 `nn.Linear` on the CPU: no subclass (those own their layout), no hooks."""
    if (
        type(module) is not nn.Linear
        or module._forward_hooks
        or module._forward_pre_hooks
        or hasattr(module, "_hf_hook")
    ):
        return False
    weight = module.weight
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() > 0


def pack(model: nn.Module) -> int:
    """Replace every float32 CPU `nn.Linear` inside `model` by a `PackedLinear`; how many were replaced.

    In place, and final: the model can no longer be trained. Dense weights are freed unless someone
    else holds them: a head tied to the embedding is packed for itself while the embedding keeps its
    own weight for look-up. A layer used in several places stays one layer. Packing again replaces
    nothing more; 0 where this build cannot pack (the model is left as it was).
    """
    if not available():
        return 0
    count = 0
    packed: MutableMapping[nn.Module, PackedLinear] = WeakKeyDictionary()  # weak: each dense weight goes at once
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.Linear) and child not in packed and packable(child):
                packed[child] = PackedLinear(child.weight.detach(), child.bias).train(child.training)
                count += 1
            if child is not None and child in packed:
                setattr(parent, name, packed[child])
    return count


def unpacked_copy(model: nn.Module) -> nn.Module:
    """A plain model to compare a packed one with: layers that can be unpacked are plain ones again.

    Everything else (embeddings, norms, buffers) is shared with `model`, so only the linear weights take
    memory a second time. Returns `model` itself if nothing in it is packed.
    """
    whole: Any = model
    if hasattr(whole, "unpacked"):
        return cast(nn.Module, whole.unpacked())
    packed: list[Any] = [module for module in model.modules() if hasattr(module, "unpacked")]
    if not packed:
        return model
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo | {id(module): module.unpacked() for module in packed})


def _pack(weight: Tensor) -> Tensor:
    if not available():
        raise ValueError("this build of torch cannot pack weights (no oneDNN)")
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise ValueError(f"only float32 weights on the CPU can be packed, got {weight.dtype} on {weight.device}")
    with torch.no_grad():
        return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT))


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
