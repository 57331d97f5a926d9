"""A linear layer whose float weights are rounded to 8 bits: a quarter of the memory traffic, where drafts are made.

Each 32 weights of an output share a scale, as in a GGUF file's Q8_0; products are those of packed weights
(utils/kernels/quantized_linear.py), with one record for all calls. Knows no models.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor, nn

from utils.kernels.blocks import COLUMNS, GROUP, LAYOUTS, Codes
from utils.kernels.compiler import at_hand
from utils.kernels.quantized_linear import PackedWeight
from utils.kernels.team import introduce, run

LAYOUT, MOST = LAYOUTS[2], 127  # 8-bit codes and 16-bit scales


def fits(weight: Tensor) -> bool:
    """Whether a layer of this weight [out, in] can be made here, without loading the compiler for it."""
    return weight.device.type == "cpu" and weight.shape[1] % GROUP == 0 and at_hand()


def rounded(weight: np.ndarray) -> Codes:
    """The nearest codes of float32 weight [N, K], scaled so that the largest of a group is ±127."""
    groups = weight.reshape(len(weight), -1, GROUP)
    scales = (np.abs(groups).max(axis=2) / MOST).astype(np.float16).astype(np.float32)
    codes = np.rint(groups / np.where(scales, scales, 1)[..., None]).clip(-MOST, MOST).astype(np.int8)
    return Codes(LAYOUT, codes.reshape(weight.shape), scales)


class ByteLinear(nn.Module):
    """y = x Wᵀ; x float32 [..., in] on the CPU → y [..., out]. No gradient, no bias."""

    def __init__(self, weight: Tensor) -> None:
        from utils.kernels.compiled_product import PRODUCT, product
        from utils.kernels.products import columns_entry

        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = PackedWeight.of(rounded(weight.detach().float().numpy()))
        self._function, self._busy = product.address, threading.Lock()
        self._record = np.zeros(1, PRODUCT)
        self._activations = torch.empty(0, dtype=torch.uint8)
        introduce(self._record)
        self._set(
            groups=self.packed.data.shape[1],
            blocks=len(self.packed.data),
            layout=self.packed.number,
            weights=self.packed.address,
            columns=columns_entry.address,
        )

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            self._record[name] = value

    @property
    def weight(self) -> Tensor:
        """A dense copy [out, in] of what the codes mean, made anew at every access."""
        return self.packed.dense()

    def forward(self, x: Tensor) -> Tensor:
        from utils.kernels.products import room

        flat = x.reshape(-1, self.in_features).contiguous()
        result = torch.empty(len(flat), len(self.packed.data) * COLUMNS)
        if not len(flat):
            return result[:, : self.out_features].reshape(*x.shape[:-1], -1)
        with self._busy:
            if (needed := room(len(flat), self.in_features)) > self._activations.numel():
                self._activations = torch.empty(needed, dtype=torch.uint8)
            places = {"x": flat, "activations": self._activations, "result": result}
            self._set(rows=len(flat), **{name: part.data_ptr() for name, part in places.items()})
            run(self._function, self._record, torch.get_num_threads())
        return result[:, : self.out_features].reshape(*x.shape[:-1], self.out_features)
