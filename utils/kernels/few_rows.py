"""A float32 product for few rows at a time, as decoding needs it: MKL's packed one, where it is the faster.

On Intel processors it beats oneDNN's up to 16 rows and loses beyond (docs/notes.md, "Few rows on Intel"); on AMD's
it does not. It is a second copy of the weight, beside the one that serves many rows. Knows no layers.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import cast

import psutil
import torch
from torch import Tensor

FEW = 16  # rows it is laid out for
_SHARE = 8  # a model may take a second copy of its weights if they are no more than one part in so many of the memory


class FewRows:
    """x Wᵀ + b for x [..., in] of at most `FEW` rows, with W [out, in] packed once.

    The layout holds for every number of rows; only the kernel's choice depends on the number it was made for.
    """

    def __init__(self, weight: Tensor) -> None:
        """`weight`: float32, CPU. It is not kept."""
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), FEW)
        self._shape = torch.zeros(1).expand(weight.shape)  # all that the operator reads of a packed weight's original

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.numel() // x.shape[-1]
        return cast(Tensor, torch.ops.mkl._mkl_linear(x, self._packed, self._shape, bias, rows))


def fits(x: Tensor) -> bool:
    """Whether a float32 CPU tensor [..., in] has few rows, and any."""
    return 0 < x.numel() <= FEW * x.shape[-1]


@functools.cache
def available() -> bool:
    """Whether this build of torch has the product, this processor gains by it, and it computes what it should."""
    if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear") and _intel()):
        return False
    weight = torch.arange(35.0).view(5, 7).sin()
    product = FewRows(weight)
    inputs = [torch.arange(7.0 * rows).view(rows, 7).cos() for rows in (1, 2, FEW - 1, FEW)]
    return all(torch.allclose(product(x, None), x @ weight.t(), atol=1e-4) for x in inputs)


def affordable(count: int) -> bool:
    """Whether a second copy of `count` float32 weights is small beside this machine's memory."""
    return bool(count * 4 * _SHARE <= psutil.virtual_memory().total)


def _intel() -> bool:
    described = Path("/proc/cpuinfo")
    return "GenuineIntel" in (described.read_text(errors="replace") if described.exists() else platform.processor())
