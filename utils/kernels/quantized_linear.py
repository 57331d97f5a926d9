"""Layers over packed weights: linear layers, embeddings and experts over a GGUF file's blocks, over floats, or over
floats that are rounded here to 4 or 8 bits.

Packing lays blocks or floats out for the kernels without rounding (kernels.h). Layers have the interface of `nn.Linear`
and `nn.Embedding`. Linear ones run in the kernels for float32 on the CPU without gradients, else over a dequantised
weight. In the kernels a row's result depends on that row alone, bit for bit: neither on the other rows nor on the
number of threads.

A model's layers can be replaced by such ones. A plain `nn.Linear` brings its weight into a kernel's layout on every
call, which makes a pass over 4 or 8 tokens cost a multiple of a pass over one. Packed weights are the only copy.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.kernels.bindings import (
    CODES,
    COLUMNS,
    FILE_BLOCKS,
    FLOATS,
    GROUP,
    LOOK_UP,
    PRODUCT,
    TYPES,
    LookUp,
    Product,
    Structure,
    Weight,
    at_hand,
    kernels,
    load,
    run,
)
from utils.objects import HfModel

KINDS = ("q4", "q8")  # float weights are rounded to these in groups of 32; "q4" gives embedding and head 8 bits
FLOAT_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ROUNDED = 4096  # rows of a weight that are rounded at a time
_PACKED = 1 << 24  # numbers that a thread packs at a time


def width_of(kind: str, data: np.ndarray) -> int:
    """Return how many numbers a row of `data` [N, bytes] holds."""
    numbers, size = FILE_BLOCKS[kind]
    return int(data.shape[1]) // size * numbers


def pack_rows(kind: str, data: np.ndarray, check: Callable[[], None] = lambda: None) -> np.ndarray:
    """Return uint8 [N / 16 rounded up, bytes of 16 columns] of a weight whose rows are `data` [N, bytes] in a file.

    `check` is called now and then; its exception ends the work.
    """
    data = np.ascontiguousarray(data)
    count, number, width = len(data), TYPES.index(kind), width_of(kind, data)
    blocks, size = -(-count // COLUMNS), kernels().packed_size(number, COLUMNS, width)
    packed = torch.empty((blocks, size), dtype=torch.uint8).numpy()  # aligned to 64 bytes
    step = max(1, _PACKED // (COLUMNS * width))

    def pack_piece(first: int) -> None:
        check()
        last = min(blocks, first + step)
        kernels().pack(number, data.ctypes.data, count, width, packed[first:].ctypes.data, first, last)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(pack_piece, range(0, blocks, step)))
    return packed


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [out, in] in the kernels' layout."""

    data: np.ndarray  # uint8 [out / 16 rounded up, bytes of 16 columns]
    kind: str  # GGUF's name of its type
    out_features: int
    in_features: int

    @staticmethod
    def of(kind: str, data: np.ndarray, check: Callable[[], None] = lambda: None) -> PackedWeight:
        """The weight whose rows are `data` [out, bytes] in a GGUF file. `check`: see :func:`pack_rows`."""
        return PackedWeight(pack_rows(kind, data, check), kind, len(data), width_of(kind, data))

    @staticmethod
    def floats(weight: Tensor) -> PackedWeight:
        """Return float weights [out, in], or [count, out, in] of several matrices, packed without rounding."""
        rows = weight.detach().flatten(0, -2).contiguous()
        return PackedWeight.of(FLOAT_KINDS[weight.dtype], rows.view(torch.uint8).numpy())

    @staticmethod
    def rounded(weight: Tensor, kind: str) -> PackedWeight:
        """Return float weights [out, in] rounded to `kind`: each code is the nearest under the 16-bit scale (and
        minimum) of its group. ValueError for weights that are no numbers, or too large for 16 bits."""
        layout, weight = "Q4_1" if kind == "q4" else "Q8_0", weight.flatten(0, -2)
        pieces = [PackedWeight.of(layout, rounded_rows(part, layout)) for part in weight.split(_ROUNDED)]
        return cast(PackedWeight, PackedWeight.joined(pieces))

    @staticmethod
    def joined(parts: Sequence[PackedWeight]) -> PackedWeight | None:
        """A copy of the parts as one weight, outputs concatenated; None if they do not fit."""
        if any(part.kind != parts[0].kind for part in parts) or any(part.out_features % COLUMNS for part in parts[:-1]):
            return None
        data = torch.cat([torch.from_numpy(part.data) for part in parts]).numpy()
        return PackedWeight(data, parts[0].kind, sum(part.out_features for part in parts), parts[0].in_features)

    def part(self, first: int, last: int) -> PackedWeight:
        """Outputs `first` to `last` as a weight over the same memory. `first` is a multiple of 16."""
        blocks = self.data[first // COLUMNS : -(-last // COLUMNS)]
        return PackedWeight(blocks, self.kind, last - first, self.in_features)

    def __deepcopy__(self, memo: dict[int, object]) -> PackedWeight:
        return self  # nothing writes to it

    @property
    def width(self) -> int:
        """`out_features` in whole blocks of 16."""
        return len(self.data) * COLUMNS

    def described(self, bias: int | None = None) -> Structure:
        """Return the record of this weight for the kernels; `bias` is an address."""
        return Weight(self.data.ctypes.data, TYPES.index(self.kind), self.out_features, self.in_features, bias)

    def dense(self) -> Tensor:
        """Return the weight as a new float32 tensor [out, in]."""
        return self.rows(torch.arange(self.out_features))

    def product(self, x: Tensor, narrow: bool = False) -> Tensor:
        """x Wᵀ for contiguous float32 x [rows, in]; a view of [rows, out rounded up]. `narrow`: x in 8 bits, not 16."""
        result = torch.empty(len(x), self.width)
        if len(x):
            size = 0 if self.kind in FLOATS else self.in_features // GROUP * CODES
            codes = torch.empty(len(x) * size, dtype=torch.uint8)
            product = Product(self.described(), len(x), narrow, x.data_ptr(), result.data_ptr())
            product.input.codes = codes.data_ptr()
            run(PRODUCT, product, torch.get_num_threads())
        return result[:, : self.out_features]

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids [n] of the weight, dequantised [n, in]. IndexError for ids outside the weight."""
        ids = ids.to(torch.int64).contiguous()
        result = torch.empty(len(ids), self.in_features)
        if len(ids):
            if int(ids.min()) < 0 or int(ids.max()) >= self.out_features:
                raise IndexError(f"ids must lie in 0 … {self.out_features - 1}")
            run(LOOK_UP, LookUp(self.described(), len(ids), ids.data_ptr(), result.data_ptr()), torch.get_num_threads())
        return result


def rounded_rows(weight: Tensor, layout: str) -> np.ndarray:
    """Return float weights [N, K] rounded to `layout`, Q4_1 or Q8_0, as a GGUF file has their rows: [N, bytes].

    ValueError for weights that are no numbers, or too large for 16 bits."""
    groups = weight.detach().to(torch.float32).reshape(len(weight), -1, GROUP)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    low, scale, bounds = torch.zeros_like(least).half(), (torch.maximum(most, -least) / 127).half(), (-127, 127)
    if layout == "Q4_1":
        low, scale, bounds = least.half(), ((most - least) / 15).half(), (0, 15)
    if not (low.isfinite() & scale.isfinite()).all():
        raise ValueError("a weight is no number, or too large for 16 bits")
    steps = (groups - low.float()) / scale.float().where(scale != 0, 1.0)
    codes = steps.round().clamp(*bounds).to(torch.int8).view(torch.uint8)
    parts = [scale.view(torch.uint8), codes]
    if layout == "Q4_1":
        half = GROUP // 2
        parts = [scale.view(torch.uint8), low.view(torch.uint8), codes[..., :half] | codes[..., half:] << 4]
    return torch.cat(parts, dim=-1).reshape(len(weight), -1).numpy()


class _Quantized(nn.Module):
    """A layer over a packed weight, with a dense `weight` to read; with `hides_weight` that is None."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed, self.hides_weight = packed, False

    @property
    def weight(self) -> nn.Parameter | None:
        """A new dense copy of the weight at every access: writing to it changes nothing. None if it is hidden."""
        return None if self.hides_weight else self.dense()

    def dense(self) -> nn.Parameter:
        """A new dense copy of the weight."""
        return nn.Parameter(self.packed.dense(), requires_grad=False)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.dense()


class QuantizedLinear(_Quantized):
    """y = x Wᵀ + b with W [out, in] packed; x [..., in] → y [..., out]. `narrow`: x in 8 bits, not in 16."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None, narrow: bool = False) -> None:
        super().__init__(packed)
        self.narrow = narrow
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self.register_buffer("bias", bias)
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, of x [..., K]: [..., N]."""
        if x.dtype != torch.float32 or x.device.type != "cpu" or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.dense().to(x), None if self.bias is None else self.bias.to(x))
        y = self.packed.product(x.reshape(-1, self.in_features).contiguous(), self.narrow)
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)

    def parts(self, *sizes: int) -> list[QuantizedLinear]:
        """Layers of `sizes` outputs each, over the same memory; [] where one would not begin at a multiple of 16."""
        ends = list(itertools.accumulate(sizes))
        if any(end % COLUMNS for end in ends[:-1]):
            return []
        return [
            QuantizedLinear(
                self.packed.part(first, last), None if self.bias is None else self.bias[first:last], self.narrow
            )
            for first, last in itertools.pairwise([0, *ends])
        ]

    def unpacked(self) -> nn.Linear:
        """Return the plain layer with the same numbers."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = self.dense()
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear.train(self.training)


class QuantizedEmbedding(_Quantized):
    """Rows of a packed table [count, size], multiplied by `scale`; ids [...] → [..., size]."""

    def __init__(self, packed: PackedWeight, scale: float = 1.0) -> None:
        super().__init__(packed)
        self.scale = scale
        self.num_embeddings, self.embedding_dim = packed.out_features, packed.in_features

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids.reshape(-1)).view(*ids.shape, self.embedding_dim) * self.scale

    def unpacked(self) -> nn.Embedding:
        """The plain layer with the same numbers."""
        return cast(nn.Embedding, nn.Embedding.from_pretrained(self.dense() * self.scale))


class QuantizedExperts(nn.Module):
    """The experts of a mixture over packed weights: `gate`, `up` and `down` of each. `plain` is transformers' module
    without weights, which has the activation."""

    def __init__(
        self, experts: Sequence[tuple[PackedWeight, PackedWeight, PackedWeight]], plain: HfModel = None
    ) -> None:
        super().__init__()
        self.experts, self.plain, self.narrow = experts, [plain], False

    @staticmethod
    def of(weights: Mapping[str, PackedWeight], count: int, plain: HfModel = None) -> QuantizedExperts:
        """Split weights of all experts, outputs concatenated, under transformers' names or a GGUF file's."""

        def each(name: str, part: int = 0, parts: int = 1) -> list[PackedWeight]:
            size = weights[name].out_features // count // parts
            return [weights[name].part(size * at, size * (at + 1)) for at in range(part, count * parts, parts)]

        joined = "gate_up_proj" in weights
        gate = each("gate_up_proj", 0, 2) if joined else each("gate_proj")
        up = each("gate_up_proj", 1, 2) if joined else each("up_proj")
        return QuantizedExperts(list(zip(gate, up, each("down_proj"), strict=True)), plain)

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [rows, in] through the chosen experts of each row, weighted by their shares [rows, K]: [rows, in]."""
        result = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, nth = torch.where(chosen == number)
            gate, up, down = self.experts[number]
            read = x[rows].contiguous()
            inner = self.plain[0].act_fn(gate.product(read, self.narrow)) * up.product(read, self.narrow)
            result.index_add_(0, rows, down.product(inner.contiguous(), self.narrow) * shares[rows, nth, None])
        return result

    def unpacked(self) -> nn.Module:
        """transformers' module with the same numbers."""
        twin: HfModel = copy.deepcopy(self.plain[0])
        both = [torch.cat([gate.dense(), up.dense()]) for gate, up, _ in self.experts]
        twin.gate_up_proj = nn.Parameter(torch.stack(both), requires_grad=False)
        twin.down_proj = nn.Parameter(torch.stack([down.dense() for *_, down in self.experts]), requires_grad=False)
        return cast(nn.Module, twin)


def fits(weight: Tensor) -> bool:
    """Return whether this float weight [out, in] can be rounded, with kernels that are loaded already."""
    return weight.device.type == "cpu" and weight.shape[1] % GROUP == 0 and at_hand()


def narrow_activations(model: nn.Module, narrow: bool = True) -> None:
    """Let the activations of this model's packed linear layers have 8 bits, as in llama.cpp, or else 16."""
    for part in model.modules():
        if isinstance(part, QuantizedLinear | QuantizedExperts):
            part.narrow = narrow


def packable(module: nn.Module) -> bool:
    """Return whether `module` is an `nn.Linear` of floats on the CPU, not a subclass, without hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
    return type(module) is nn.Linear and not hooked and _is_float(module.weight)


def _is_float(weight: Tensor) -> bool:
    return weight.dtype in FLOAT_KINDS and weight.device.type == "cpu" and weight.numel() > 0


def _weights(part: HfModel, tables: bool, step: int) -> dict[str, Tensor]:
    """Return the weights of a layer that can be packed, by name; {} if it has none, or rows of another size than a
    multiple of `step`."""
    is_table = type(part) is nn.Embedding or hasattr(part, "scalar_embed_scale")
    weights = {}
    if packable(part) or (tables and is_table and _is_float(part.weight)):
        weights = {"weight": part.weight}
    elif tables and isinstance(getattr(part, "gate_up_proj", None), nn.Parameter):
        weights = {name: getattr(part, name) for name in ("gate_up_proj", "down_proj")}
    return weights if all(weight.shape[-1] % step == 0 for weight in weights.values()) else {}


def layer_over(part: HfModel, weights: Mapping[str, PackedWeight]) -> nn.Module:
    """The layer over packed weights, by their names in `part`, which it replaces; the weights of experts are freed."""
    if isinstance(part, nn.Embedding):
        return QuantizedEmbedding(weights["weight"], getattr(part, "scalar_embed_scale", 1.0))
    if isinstance(part, nn.Linear):
        return QuantizedLinear(weights["weight"], None if part.bias is None else part.bias.detach())
    for name in weights:
        setattr(part, name, nn.Parameter(getattr(part, name).detach().to("meta"), requires_grad=False))
    return QuantizedExperts.of(weights, part.num_experts, part)


def _pack(model: nn.Module, make: Callable[[Tensor, bool], PackedWeight], tables: bool, step: int = 1) -> int:
    """Replace layers in turn, so that each dense weight is freed at once; return how many weights were packed."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = [name for name, part in model.named_modules(remove_duplicate=False) if _weights(part, tables, step)]
    packed: dict[int, PackedWeight] = {}
    for name in names:
        part = model.get_submodule(name)
        chosen = {}
        for own, weight in _weights(part, tables, step).items():
            if id(weight) not in packed:
                packed[id(weight)] = make(weight, part is head or isinstance(part, nn.Embedding))
            chosen[own] = packed[id(weight)]
        model.set_submodule(name, layer_over(part, chosen).train(part.training))
        del part, weight
    return len(packed)


def pack(model: nn.Module, tables: bool = False) -> int:
    """Replace every `nn.Linear` of floats on the CPU inside `model`, with `tables` embeddings and experts too, by
    layers over the same numbers; return how many weights were packed.

    In place, and final: the model can no longer be trained. Dense weights are freed unless something else holds them,
    as an embedding that stays holds the weight of a tied head. Without kernels it does nothing.
    """
    return _pack(model, lambda weight, _: PackedWeight.floats(weight), tables) if load() else 0


def quantize(model: nn.Module, kind: str, tables: bool) -> None:
    """Replace the layers that :func:`pack` replaces by layers over weights that are rounded to `kind`.

    Weights whose rows are no multiple of 32 numbers stay as they are. ValueError as :meth:`PackedWeight.rounded`.
    """
    _pack(model, lambda weight, outside: PackedWeight.rounded(weight, "q8" if outside else kind), tables, GROUP)


def unpacked_copy(model: nn.Module) -> nn.Module:
    """The plain model of a packed one: its packed layers are plain again, everything else is shared.

    `model` itself if nothing in it is packed.
    """
    whole: HfModel = model
    if hasattr(whole, "unpacked"):
        return cast(nn.Module, whole.unpacked())
    packed: list[HfModel] = [module for module in model.modules() if hasattr(module, "unpacked")]
    if not packed:
        return model
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo | {id(module): module.unpacked() for module in packed})
