"""A GGUF file's weights without expanding them: laid out for the kernels once, kept beside the converted model, mapped.

The first load reads the file's blocks (utils/kernels/blocks.py) and writes one file of packed weights; later ones map
it, so weights are read from disk as they are used and shared between processes. A file with a tensor of a type, or a
model of a kind, that the kernels do not know is loaded as float32, as ever.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from utils.files import replacing, write_text
from utils.kernels.blocks import GROUP, LAYOUTS, TYPES, lossless, pack, read_blocks
from utils.kernels.compiler import keep_in
from utils.kernels.instruction_sets import instruction_set
from utils.kernels.quantized_linear import PackedWeight, put_weights
from utils.loading.cache import cache_folder, is_whole, locked, publish, remembered_sha256, scratch, writing
from utils.loading.sources import gguf_file
from utils.progress import Progress, check

if TYPE_CHECKING:
    from utils.catalogue.specs import ModelSpec
    from utils.loading.loaded import LoadOptions

FORMAT = 1  # raised whenever the same file would be packed differently
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # the file's word for an architecture, transformers'
_OF_ONE_PASS = {*(f"{name}Config" for name in FAMILIES.values()), "MistralConfig"}
_ALIGNED, _PAST = 64, 8192  # where a weight may begin; what lies behind the last one may be fetched ahead of its use

_OUTSIDE = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IGNORED = ("rope_freqs.weight",)  # in the converted model's configuration


class UnfitError(Exception):
    """The kernels cannot compute with this file, for the reason said."""


def load_packed(
    spec: ModelSpec, config: Any, folder: Path, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[Any, str] | None:
    """The model of a GGUF file over its own bits, and their commonest type; None where it is to be loaded as float32.

    `folder` holds the converted model, whose `config` it is. Raises UserError or Cancelled.
    """
    if instruction_set() is None or not runs_as_one(config):
        return None
    if spec.package is None and spec.gguf is None:
        return None

    def fetched() -> Path:
        return cast(Path, gguf_file(spec, options, progress, cancelled))

    digest = spec.sha256 if spec.package is not None else remembered_sha256(Path(str(spec.gguf)), cancelled)
    entry = None if digest is None else packed_entry(fetched, digest, progress, cancelled)
    found = None if entry is None else packed_model(config, entry, folder)
    if found is not None:
        make_kernels(progress)
    return found


def make_kernels(progress: Progress) -> None:
    """Compile what every product needs, behind a line of progress, unless this machine's user has it already."""
    keep_in(cache_folder() / "compiled")
    from utils.kernels.products import columns_entry

    if not columns_entry.is_kept:
        progress("compiling the kernels, once on this machine", None)
    _ = columns_entry.address


def runs_as_one(config: Any) -> bool:
    """Whether a model of `config`, its weights packed, runs as one compiled pass (sampling/models/fused.py). Where it
    would not, its many small products cost more than float32 saves, so its file is converted as ever."""
    heads = getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return (
        type(config).__name__ in _OF_ONE_PASS
        and not any(width % GROUP for width in (size, config.hidden_size, config.intermediate_size))
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and not any(getattr(config, name, None) for name in ("sliding_window", "attention_bias", "mlp_bias"))
        and config.hidden_act in ("silu", "swish")
        and (getattr(config, "rope_parameters", None) or {}).get("rope_type") not in ("dynamic", "longrope")
    )


def packed_entry(
    source: Callable[[], Path], digest: str, progress: Progress, cancelled: Callable[[], bool]
) -> Path | None:
    """Where the packed weights of the GGUF file with sha256 `digest` lie; made if missing, None if they are unfit."""
    entry = cache_folder() / "packed" / digest[:16]
    made_from: dict[str, object] = {"sha256": digest, "format": FORMAT}
    if is_whole(entry, made_from):
        return entry
    with locked(entry, progress, cancelled):
        if is_whole(entry, made_from):
            return entry
        with scratch(entry) as folder:
            try:
                with writing(folder):
                    _write(source(), folder, progress, cancelled)
            except UnfitError:
                return None
            publish(folder, entry, made_from)
    return entry


def module_name(name: str) -> tuple[str, str]:
    """A tensor's name in the file → its module's in transformers, and "weight" or "bias". UnfitError for others."""
    parts = name.split(".")
    known = _OUTSIDE.get(parts[0]) if len(parts) == 2 else None
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _INSIDE:
        known = f"model.layers.{parts[1]}.{_INSIDE[parts[2]]}"
    if known is None or parts[-1] not in ("weight", "bias"):
        raise UnfitError(f"no place for the tensor {name}")
    return known, parts[-1]


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads · D, …] of a query or key map as llama.cpp turns them, neighbours in pairs → halves, as transformers
    does."""
    shaped = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(shaped.swapaxes(1, 2)).reshape(rows.shape)


def _write(source: Path, folder: Path, progress: Progress, cancelled: Callable[[], bool]) -> None:
    """`weights.bin`: packed weights and float32 vectors one after another; `index.json` says what lies where."""
    import gguf

    reader = gguf.GGUFReader(str(source))
    architecture = str(reader.fields["general.architecture"].contents())
    if architecture not in FAMILIES:
        raise UnfitError(f"no compiled pass for {architecture}")

    def said(name: str) -> int:
        return int(reader.fields[f"{architecture}.attention.{name}"].contents())

    heads = {"attn_q": said("head_count"), "attn_k": said("head_count_kv")} if architecture == "llama" else {}
    weights: dict[str, Any] = {}
    vectors: dict[str, Any] = {}
    types: Counter[str] = Counter()
    with replacing(folder / "weights.bin") as out:

        def put(data: np.ndarray) -> int:
            out.write(b"\0" * (-out.tell() % _ALIGNED))
            start = out.tell()
            out.write(np.ascontiguousarray(data).data)
            return start

        for done, tensor in enumerate(reader.tensors):
            check(cancelled)
            progress(f"packing {source.name}", done / len(reader.tensors))
            if tensor.name in _IGNORED:
                continue
            name, part = module_name(tensor.name)
            kind, data = tensor.tensor_type.name, np.asarray(tensor.data)
            turned = heads.get(tensor.name.split(".")[-2])
            data = halves_apart(data, turned) if turned else data
            if data.ndim == 1 and kind == "F32":
                vectors[f"{name}.{part}"] = {"at": put(data), "size": len(data)}
                continue
            if kind not in TYPES or part != "weight":
                raise UnfitError(f"no kernel for {kind}, the type of {tensor.name}")
            weight = read_blocks(kind, data)
            if not lossless(weight):
                raise UnfitError(f"the scales of {tensor.name} are out of range")
            packed = pack(weight)
            shape = [*packed.shape, len(weight.codes)]
            weights[name] = {"at": put(packed), "shape": shape, "layout": LAYOUTS.index(weight.layout)}
            types[kind] += packed.size
            del weight, packed
        out.write(b"\0" * _PAST)
    most = types.most_common(1)[0][0]
    text = json.dumps({"architecture": architecture, "type": most, "weights": weights, "vectors": vectors})
    write_text(folder / "index.json", text)


def packed_model(config: Any, entry: Path, folder: Path) -> tuple[Any, str] | None:
    """The transformers model of `config` over the packed weights in `entry`, and their commonest type; None if it has
    other parts than the file. `folder` is the converted model's, for what is said about generation."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    index = json.loads((entry / "index.json").read_text(encoding="utf-8"))
    if type(config).__name__ != f"{FAMILIES[index['architecture']]}Config":
        return None
    data = np.memmap(entry / "weights.bin", np.uint8, mode="r")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, said in index["vectors"].items():
        parent, _, part = name.rpartition(".")
        values = torch.from_numpy(data[said["at"] : said["at"] + 4 * said["size"]].view(np.float32).copy())
        setattr(model.get_submodule(parent), part, nn.Parameter(values, requires_grad=False))
    weights = {}
    for name, said in index["weights"].items():
        *shape, count = said["shape"]
        part = data[said["at"] : said["at"] + int(np.prod(shape))].reshape(shape)
        weights[name] = PackedWeight(part, LAYOUTS[said["layout"]], count)
    weights.setdefault("lm_head", weights["model.embed_tokens"])
    put_weights(model, weights)
    trunk: Any = model.model
    trunk.rotary_emb = type(trunk.rotary_emb)(config=config)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model.eval(), str(index["type"])


def weight_bytes(model: Any) -> int:
    """Bytes of a model's packed weights, shared ones once."""
    return sum(one.data.nbytes for one in _packed(model))


def weight_count(model: Any) -> int:
    """How many weights they are."""
    return sum(one.in_features * one.out_features for one in _packed(model))


def _packed(model: Any) -> set[PackedWeight]:
    return {part.packed for part in model.modules() if isinstance(getattr(part, "packed", None), PackedWeight)}
