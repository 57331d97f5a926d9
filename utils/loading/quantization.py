"""4 and 8 bit weights: q4 and q8 by our kernels on the CPU; the others by bitsandbytes, on CPU and CUDA. Also counts a
model's bytes and parameters, since packed 4-bit weights hide their true number.
"""

from __future__ import annotations

import importlib.util
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import UsageError, UserError
from utils.kernels.build import why_not
from utils.kernels.quantized_linear import KINDS

BITSANDBYTES = ("int8", "nf4", "fp4")
QUANTIZATIONS = ("none", *KINDS, *BITSANDBYTES)


def quantization_config(kind: str, device: torch.device, dtype: torch.dtype) -> Any | None:
    """The transformers configuration for `kind`; None for "none" and for our kernels. 4 bit computes in `dtype`.

    Raises UsageError for an impossible kind or device, UserError without bitsandbytes.
    """
    if kind not in QUANTIZATIONS:
        raise UsageError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got '{kind}'")
    if kind == "none":
        return None
    if kind in KINDS:
        if device.type != "cpu" or dtype != torch.float32:
            got = f"{str(dtype).removeprefix('torch.')} on {device.type}"
            raise UsageError(f"quantization {kind} computes in float32 on the cpu, got {got}")
        if why := why_not():
            raise UserError(f"quantization {kind} has no kernels here ({why}): use --quantization none")
        return None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"quantization {kind} runs on cpu and cuda, not on {device.type}: use --quantization none")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {kind} needs the package bitsandbytes: install it, or use --quantization none")
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)


def held_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once, scales and code books included."""
    tensors: list[Any] = [*model.parameters(), *model.buffers(), *chain.from_iterable(map(_states, model.modules()))]
    # Of a tensor that several processes share, this process holds a part.
    tensors = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({_key(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def parameter_count(model: nn.Module) -> int:
    """The number of weights: shared ones once, 4-bit ones unpacked."""
    counted = {}
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        shape = parameter.shape if state is None else state.shape
        counted[_key(parameter)] = int(shape.numel())
    return sum(counted.values())


def _key(tensor: Tensor) -> tuple[Any, ...]:
    without_memory = tensor.is_meta or tensor.is_mkldnn
    return (id(tensor),) if without_memory else (tensor.data_ptr() or id(tensor), tensor.numel())


def _states(module: nn.Module) -> list[Tensor]:
    """Return the tensors that bitsandbytes keeps beside a layer's weight."""
    weight = module._parameters.get("weight")  # not the attribute, for which a packed layer unpacks its weight
    in_4_bits, in_8_bits = getattr(weight, "quant_state", None), getattr(module, "state", None)
    kept = list(in_4_bits.as_dict().values()) if in_4_bits is not None else [getattr(weight, "SCB", None)]
    kept += [getattr(in_8_bits, name, None) for name in ("SCB", "CB")]
    return [tensor for tensor in kept if isinstance(tensor, Tensor)]
