"""A GGUF file's header: its metadata and the table of its tensors, over all parts of a split file; and their names.

Refuses by name a file that ends too early, a missing part, and tensors at other offsets than the format demands. Reads
a tensor only in :meth:`TensorInfo.read`.
"""

import functools
import mmap
import re
import struct
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from utils.catalogue.heads import HEAD_KINDS
from utils.catalogue.specs import gguf_parts, is_gguf
from utils.errors import UnfitError, UserError, holding, raise_first
from utils.objects import Json

_ALIGNMENT = 32  # bytes; the alignment of a file that names none
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY, _SIZE = 8, 9, struct.Struct("<Q")
UNDEFINED = (*HEAD_KINDS, "pard", "pard2", "medusa")  # no files of llama.cpp; `head` handles dflash and dspark before
TOKENS = "tokenizer.ggml.tokens"
_NO_PARAMETERS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight")


class TensorInfo(NamedTuple):
    """A tensor in a file: `size` bytes of `file` from `start` on, with torch's `shape` and a `kind` such as Q4_K."""

    name: str
    shape: tuple[int, ...]
    kind: str
    file: Path
    start: int
    size: int

    def read(self) -> np.ndarray:
        """Return the tensor's bytes, uint8 [size], copied: a mapped file would count as resident memory."""
        return np.fromfile(self.file, np.uint8, self.size, offset=self.start)

    def floats(self) -> np.ndarray:
        """Return the tensor's numbers, float32 in its shape."""
        return dequantized(self.read(), self.kind).reshape(self.shape)


def dequantized(data: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers of a tensor's bytes, float32: rows [N, bytes] as [N, K]."""
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(data, GGMLQuantizationType[kind])


class GgufHeader(NamedTuple):
    """A file's header. In place of an array of texts other than the tokens `metadata` has its length."""

    metadata: Json
    tensors: tuple[TensorInfo, ...]
    parts: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unnamed"))

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of a key under the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def head(self) -> str:
        """The kind of draft head that the file holds alone: eagle, dflash, jetspec, dspark, dflash2, mtp or assistant;
        "" for a model, with layers for multi-token prediction or without. UserError for a kind that has no such file.
        """
        names = {tensor.name for tensor in self.tensors}
        if self.architecture in ("dflash", "dspark"):  # older builds write dspark, newer ones dflash for both
            return holding(
                {
                    "dspark": "markov_w1.weight" in names,
                    "dflash2": "selector_hidden.weight" in names,
                    "jetspec": self.get("attention.causal"),
                    "dflash": True,
                }
            )[0]
        if self.get("nextn_predict_layers") and "blk.0.attn_norm.weight" not in names:
            return "mtp"
        if self.architecture in UNDEFINED:
            raise UserError(
                f"{self.parts[0].name} says that it is a {self.architecture} head: llama.cpp defines no such file, "
                "name the folder that it was made of"
            )
        return {"eagle3": "eagle", "gemma4-assistant": "assistant"}.get(self.architecture, "")

    def factors(self) -> dict[str, list[float]]:
        """Return the rotary factors by the tensors' names. UserError if they are of another type than F32."""
        named = [tensor for tensor in self.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
        if other := next((tensor for tensor in named if tensor.kind != "F32"), None):
            raise UserError(f"{other.name} is {other.kind}, where factors of positions are F32")
        return {tensor.name: tensor.read().view(np.float32).tolist() for tensor in named}

    @property
    def parameters(self) -> list[TensorInfo]:
        """The tensors without those whose numbers go into the configuration."""
        return [tensor for tensor in self.tensors if not _NO_PARAMETERS.fullmatch(tensor.name)]


def read_header(file: Path) -> GgufHeader:
    """Return the header of a GGUF file, of all parts if `file` is one of several. UserError names the mistake."""
    metadata, tensors = _header_of(file)
    if (count := metadata.get("split.count", 1)) <= 1:
        return GgufHeader(metadata, tensors, (file,))
    if len(parts := gguf_parts(file)) != count:
        raise UserError(f"{file} is one of {count} parts: name it …-00001-of-{count:05}.gguf, as it was")
    headers = []
    for number, part in enumerate(parts):
        if not part.is_file():
            raise UserError(f"{file.name} is one of {count} parts, and {part} is missing")
        headers.append(_header_of(part))
        if [headers[-1][0].get(key) for key in ("split.no", "split.count")] != [number, count]:
            raise UserError(f"{part} is not part {number + 1} of {count}, as its name says")
    metadata, tensors = headers[0][0], tuple(tensor for _, held in headers for tensor in held)
    different = len({tensor.name for tensor in tensors})
    if not different == len(tensors) == metadata.get("split.tensors.count", len(tensors)):
        raise UserError(f"the parts of {file} hold {different} tensors, not those that the first one counts")
    return GgufHeader(metadata, tensors, parts)


def _header_of(file: Path) -> tuple[Json, tuple[TensorInfo, ...]]:
    """Return metadata and tensors of one file."""
    raise_first(
        {
            f"no GGUF file {file}": not file.is_file(),
            f"{file} is no GGUF file: it does not begin with GGUF": not is_gguf(file),
        },
        UserError,
    )
    stat = file.stat()
    return _parsed(file, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _parsed(file: Path, size: int, _changed: int) -> tuple[Json, tuple[TensorInfo, ...]]:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            metadata, table, end = _tables(data)
        except (struct.error, IndexError):
            raise UserError(f"{file} is incomplete: it has {size:,} bytes and ends within its header") from None
        except (ValueError, KeyError, OverflowError, MemoryError) as error:
            raise UserError(f"{file} is damaged: {' '.join(str(error).split())[:100]}") from None
    for key in ("general.alignment", "split.no", "split.count", "split.tensors.count"):
        if not isinstance(value := metadata.get(key, 0), int):
            raise UserError(f"{file} is damaged: {key} is {value!r}")
    return metadata, _tensors(file, size, metadata.get("general.alignment", _ALIGNMENT), table, end)


def _tables(data: mmap.mmap) -> tuple[Json, list[tuple[str, tuple[int, ...], int, int]], int]:
    """Return the metadata; name, shape, type and offset of each tensor; and the offset at which the header ends."""
    data.seek(4)
    version, tensors, values = _numbers(data, "IQQ")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; 2 and 3 are read, little-endian")
    metadata: Json = {}
    for _ in range(values):
        key = _text(data)
        metadata[key] = _value(data, _numbers(data, "I")[0], key == TOKENS)
    table = []
    for _ in range(tensors):
        name, (count,) = _text(data), _numbers(data, "I")
        *sizes, kind, offset = _numbers(data, f"{count}QIQ")
        table.append((name, tuple(reversed(sizes)), kind, offset))
    return metadata, table, data.tell()


def _numbers(data: mmap.mmap, layout: str) -> tuple[Any, ...]:
    """Return the next numbers of a file, by a layout of the module struct. struct.error if they are not all there."""
    return struct.unpack(f"<{layout}", data.read(struct.calcsize(f"<{layout}")))


def _text(data: mmap.mmap) -> str:
    (size,) = _SIZE.unpack(data.read(_SIZE.size))
    if size > len(data) - data.tell():
        raise IndexError
    return data.read(size).decode()


def _value(data: mmap.mmap, kind: int, keep: bool = False) -> Any:
    """Return the next value of a file; of an array of texts its length unless `keep`."""
    if kind == _TEXT:
        return _text(data)
    if kind != _ARRAY:
        return _numbers(data, _NUMBERS[kind])[0]
    inner, count = _numbers(data, "IQ")
    if count > len(data):
        raise IndexError
    if inner != _TEXT:
        return list(_numbers(data, f"{count}{_NUMBERS[inner]}"))
    if keep:
        return [_text(data) for _ in range(count)]
    at = data.tell()
    for _ in range(count):
        at += _SIZE.size + _SIZE.unpack_from(data, at)[0]
    data.seek(min(at, len(data)))
    return count


def _tensors(
    file: Path, size: int, alignment: int, table: list[tuple[str, tuple[int, ...], int, int]], end: int
) -> tuple[TensorInfo, ...]:
    """Return the table's tensors. UserError unless they lie one after another, each aligned, with nothing after the
    last.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if alignment < 1:
        raise UserError(f"{file} is damaged: an alignment of {alignment}")
    start = -(-end // alignment) * alignment
    tensors, expected, last = [], 0, 0
    for name, shape, number, offset in table:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UserError(f"{file}: {name} has type {number}, which is not read") from None
        codes, width = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % codes or offset != expected:
            raise UserError(f"{file} is damaged: {name} {shape}, {kind.name}, at {offset} of {expected}")
        last = offset + prod(shape) // codes * width
        expected = -(-last // alignment) * alignment
        tensors.append(TensorInfo(name, shape, kind.name, file, start + offset, last - offset))
    raise_first(
        {
            f"{file} is incomplete: {start + last - size:,} of {start + last:,} bytes are missing": size < start + last,
            f"{file} is damaged: no tensor claims its last {size - start - last} bytes": (
                size - start - last >= alignment
            ),
            f"{file} is damaged: two tensors have one name": len({tensor.name for tensor in tensors}) < len(tensors),
        },
        UserError,
    )
    return tuple(tensors)


def write_joined(header: GgufHeader, out: IO[bytes], *, weights: bool) -> None:
    """Write the parts of a split file as one: the first part's metadata but for `split.…`, and every tensor.

    Without `weights` the file has the same length, and a hole in their place.
    """
    from gguf import GGMLQuantizationType

    alignment = header.metadata.get("general.alignment", _ALIGNMENT)
    with header.parts[0].open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        data.seek(16)
        kept, (count,) = [], _numbers(data, "Q")
        for _ in range(count):
            begin, key = data.tell(), _text(data)
            _value(data, _numbers(data, "I")[0])
            if not key.startswith("split."):
                kept.append(data[begin : data.tell()])
        out.write(data[:8] + struct.pack("<QQ", len(header.tensors), len(kept)) + b"".join(kept))
    offset = 0
    for tensor in header.tensors:
        name, sizes = tensor.name.encode(), tensor.shape[::-1]
        out.write(struct.pack("<Q", len(name)) + name)
        out.write(struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, GGMLQuantizationType[tensor.kind], offset))
        offset += -(-tensor.size // alignment) * alignment
    out.write(b"\0" * (-out.tell() % alignment))
    if not weights:
        out.truncate(out.tell() + offset)
        return
    for tensor in header.tensors:
        out.write(tensor.read().data)
        out.write(b"\0" * (-out.tell() % alignment))


# -- the names of tensors and of transformers' modules -------------------------------------------------------

TABLE, HEAD = "model.embed_tokens", "lm_head"
ARCHITECTURES = {  # architectures of files that the compiled pass reads → the configuration's model_type
    **{name: name for name in ("llama", "qwen2", "qwen3", "phi3", "gemma2", "granite", "olmo2", "smollm3", "olmoe")},
    **{"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"},
}
_OUTSIDE = {"token_embd": TABLE, "output": HEAD, "output_norm": "model.norm"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{
        f"ffn_{part}{end}": f"mlp.{within}{part}_proj"
        for part in ("gate", "up", "down")
        for end, within in (("", ""), ("_exps", "experts."), ("_shexp", "shared_expert."))
    },
}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_OTHERWISE = {
    **{"gemma2": _GEMMA, "gemma3": _GEMMA, "gemma4-assistant": _GEMMA, "phi3": {"ffn_up": "mlp.gate_up_proj"}},
    **dict.fromkeys(("olmo2", "qwen3next", "qwen35", "qwen35moe"), _AFTER),
}


def module_name(name: str, architecture: str = "llama") -> tuple[str, str]:
    """Return the name of a tensor's module in transformers, and "weight" or "bias". UnfitError for unknown tensors."""
    parts = name.split(".")
    known = _OUTSIDE.get(parts[0]) if len(parts) == 2 else None
    if len(parts) == 4 and parts[0] == "blk":
        own = _OTHERWISE.get(architecture, {}).get(parts[2]) or _INSIDE.get(parts[2])
        known = own and f"model.layers.{parts[1]}.{own}"
    if known is None or parts[-1] not in ("weight", "bias"):
        raise UnfitError(f"no place for the tensor {name}")
    return known, parts[-1]
