"""T5's feed-forward layers without their look at the last weight, which a packed layer would unpack at every pass.

The model compares that weight's type with its input's; in a packed model both are float32. Imports torch, no
transformers.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from utils.packed_linear import PackedLinear

_PLAIN, _GATED = "DenseActDense", "DenseGatedActDense"  # behind the family: T5, MT5, UMT5 …


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
            if known and child is not None and isinstance(getattr(child, "wo", None), PackedLinear):
                setattr(parent, name, LeanDense(child).train(child.training))
                count += 1
    return count
