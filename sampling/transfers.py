"""Numbers from the host to a device and back, with few waits of the host. Knows no meaning of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def put(values: Tensor | Sequence[Any], device: torch.device | None) -> Tensor:
    """Host values as a tensor on `device`, for whose arrival the host does not wait."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def fetched(*tensors: Tensor) -> list[Tensor]:
    """The same on the host, as float64, by one transfer."""
    flat = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
