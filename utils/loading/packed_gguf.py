"""A GGUF file's weights without expanding them: laid out for the kernels once, kept beside the converted model, mapped.

The first load reads the file's blocks (utils/kernels/blocks.py) and writes one file of packed weights; later ones map
it, so weights are read from disk as they are used and shared between processes. A file with a tensor of a type, or a
model of a kind, that the kernels do not know is loaded as float32, as ever.

What is loaded is a model's parts and what its configuration file says: all that the compiled pass reads. transformers,
whose model classes take longer to import than all else, comes in where somebody asks for its own pass.
"""

from __future__ import annotations

import functools
import json
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from utils.files import replacing, write_text
from utils.kernels.blocks import GROUP, LAYOUTS, TYPES, lossless, pack, read_blocks
from utils.kernels.compiler import compile_beside, keep_in
from utils.kernels.instruction_sets import instruction_set
from utils.kernels.packed_linear import unpacked_copy
from utils.kernels.quantized_linear import PackedWeight, QuantizedEmbedding, QuantizedLinear
from utils.loading.cache import cache_folder, is_whole, locked, publish, remembered_sha256, scratch, writing
from utils.loading.quiet import quiet_libraries, quiet_warnings
from utils.loading.sources import gguf_file
from utils.progress import Progress, check
from utils.rotary import frequencies, is_fixed

if TYPE_CHECKING:
    from utils.catalogue.specs import ModelSpec
    from utils.loading.loaded import LoadOptions

FORMAT = 1  # raised whenever the same file would be packed differently
FAMILIES = ("llama", "qwen2", "qwen3")  # as both the file and the configuration say it
_OF_ONE_PASS = {*FAMILIES, "mistral"}
_ALIGNED_THERE = 32  # in a GGUF file that does not say
_ALIGNED, _PAST = 64, 8192  # where a weight may begin; what lies behind the last one may be fetched ahead of its use

_TABLE, _HEAD = "model.embed_tokens", "lm_head"
_GENERATION = "generation_config.json"
_OUTSIDE = {"token_embd": _TABLE, "output": _HEAD, "output_norm": "model.norm"}
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
_SAID = {  # without which a configuration file is read by transformers, who knows what it leaves out
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act", "rope_parameters"),
}


ONE_AT_A_TIME = threading.Lock()
"""transformers swaps functions of its classes while it builds a model: two at once leave them swapped for good."""


class UnfitError(Exception):
    """The kernels cannot compute with this file, for the reason said."""


class FileConfig(SimpleNamespace):
    """What a configuration file says, by attributes, as transformers' configurations have it. Nothing is filled in."""

    is_encoder_decoder = False

    def get_text_config(self, decoder: bool = False) -> FileConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def config_in(folder: Path) -> FileConfig | None:
    """The configuration of a converted model; None where it does not say all that the compiled pass must know."""
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return FileConfig(**stored) if isinstance(stored, dict) and stored.keys() >= _SAID else None


def load_packed(
    spec: ModelSpec, config: Any, folder: Path, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[PackedModel, str] | None:
    """The model of a GGUF file over its own bits, and their commonest type; None where it is to be loaded as float32.

    `folder` holds the converted model, whose `config` it is. Raises UserError or Cancelled.
    """
    if (spec.package is None and spec.gguf is None) or not runs_as_one(config) or instruction_set() is None:
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
    """Begin to compile what products need, behind a line of progress, unless this machine's user has it already."""
    keep_in(cache_folder() / "compiled")
    from utils.kernels.products import columns_entry

    if not columns_entry.is_kept:
        from utils.kernels.walk import over_entry, walk_entry

        progress("compiling the kernels, once on this machine", None)
        compile_beside(columns_entry, walk_entry, over_entry)


def runs_as_one(config: Any) -> bool:
    """Whether a model of `config`, its weights packed, runs as one compiled pass (sampling/models/fused.py). Where it
    would not, its many small products cost more than float32 saves, so its file is converted as ever."""
    return (
        config.model_type in _OF_ONE_PASS
        and not any(width % GROUP for width in (head_size(config), config.hidden_size, config.intermediate_size))
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and not any(getattr(config, name, None) for name in ("sliding_window", "attention_bias", "mlp_bias"))
        and config.hidden_act in ("silu", "swish")
        and is_fixed(getattr(config, "rope_parameters", None))
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


class _Tensor(NamedTuple):
    """A tensor of a GGUF file: its place in the model, its type, its rows [N, bytes of a row] or numbers [N]."""

    own_name: str
    name: str
    part: str
    kind: str
    data: np.ndarray


def _tensors(source: Path) -> tuple[str, dict[str, int], list[_Tensor]]:
    """The architecture of a GGUF file; of how many heads those maps are whose rows it has in llama.cpp's order; its
    tensors. UnfitError where one of them is of no use here.

    The gguf package makes an object of every token, which takes 20 seconds; transformers' reader steps over them.
    """
    from gguf import GGMLQuantizationType
    from transformers.integrations.gguf import reader

    data, found = np.memmap(source, np.uint8, mode="r"), list[_Tensor]()
    try:
        said, count, end = reader._read_metadata(data, str(source))
        table, end = reader._read_tensor_table(data, count, end)
        kinds = [GGMLQuantizationType(kind).name for _, _, kind, _ in table]
    except (ValueError, struct.error) as error:  # another version, or an unknown type
        raise UnfitError(str(error)) from error
    architecture, aligned = said["general.architecture"], said.get("general.alignment", _ALIGNED_THERE)
    if architecture not in FAMILIES:
        raise UnfitError(f"no compiled pass for {architecture}")
    begin = -(-end // aligned) * aligned
    for (own_name, shape, _, offset), kind in zip(table, kinds, strict=True):
        if own_name in _IGNORED:
            continue
        name, part = module_name(own_name)
        there = data[begin + offset :]
        if kind == "F32" and len(shape) == 1:
            there = there[: 4 * shape[0]].view(np.float32)
        elif kind in TYPES and len(shape) == 2 and part == "weight":
            codes, size = TYPES[kind][:2]
            there = there[: shape[0] * shape[1] // codes * size].reshape(shape[0], -1)
        else:
            raise UnfitError(f"no kernel for {kind}, the type of {own_name}")
        found.append(_Tensor(own_name, name, part, kind, there))
    if architecture != "llama":
        return architecture, {}, found
    heads = said["llama.attention.head_count"]
    return architecture, {"attn_q": heads, "attn_k": said.get("llama.attention.head_count_kv", heads)}, found


def _write(source: Path, folder: Path, progress: Progress, cancelled: Callable[[], bool]) -> None:
    """`weights.bin`: packed weights and float32 vectors one after another; `index.json` says what lies where."""
    architecture, heads, tensors = _tensors(source)
    weights: dict[str, Any] = {}
    vectors: dict[str, Any] = {}
    types: Counter[str] = Counter()
    with replacing(folder / "weights.bin") as out:

        def put(data: np.ndarray) -> int:
            out.write(b"\0" * (-out.tell() % _ALIGNED))
            start = out.tell()
            out.write(np.ascontiguousarray(data).data)
            return start

        for done, tensor in enumerate(tensors):
            check(cancelled)
            progress(f"packing {source.name}", done / len(tensors))
            turned = heads.get(tensor.own_name.split(".")[-2])
            data = halves_apart(tensor.data, turned) if turned else tensor.data
            if data.ndim == 1:
                vectors[f"{tensor.name}.{tensor.part}"] = {"at": put(data), "size": len(data)}
                continue
            weight = read_blocks(tensor.kind, data)
            if not lossless(weight):
                raise UnfitError(f"the scales of {tensor.own_name} are out of range")
            packed = pack(weight)
            shape = [*packed.shape, len(weight.codes)]
            weights[tensor.name] = {"at": put(packed), "shape": shape, "layout": LAYOUTS.index(weight.layout)}
            types[tensor.kind] += packed.size
            del weight, packed
        out.write(b"\0" * _PAST)
    most = types.most_common(1)[0][0]
    text = json.dumps({"architecture": architecture, "type": most, "weights": weights, "vectors": vectors})
    write_text(folder / "index.json", text)


class PackedModel(nn.Module):
    """The parts of a Llama-like model over packed weights, under the names that transformers has for them.

    Nothing here computes: sampling/models/fused.py runs them as one compiled pass. `whole` is transformers' own model
    over the same layers, `unpacked()` the plain one with the same numbers; both are built when they are asked for.
    """

    def __init__(
        self,
        config: FileConfig,
        generation: FileConfig,
        folder: Path,
        weights: Mapping[str, PackedWeight],
        vectors: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.config, self.generation_config, self._folder = config, generation, folder
        self._packed, self._vectors = tuple(weights), vectors
        self._place("model.layers", nn.ModuleList(nn.Module() for _ in range(config.num_hidden_layers)))
        for name, packed in weights.items():
            bias = vectors.get(f"{name}.bias")
            self._place(name, QuantizedEmbedding(packed) if name == _TABLE else QuantizedLinear(packed, bias))
        for name, values in vectors.items():
            parent, _, part = name.rpartition(".")
            if parent not in weights:
                self._place(parent, nn.Module()).register_parameter(part, nn.Parameter(values, requires_grad=False))
        turned = frequencies(config.rope_parameters, head_size(config))
        self._place("model.rotary_emb", _Rotary(*turned) if turned else self.whole.model.rotary_emb)
        self.eval()

    def _place(self, name: str, part: nn.Module) -> nn.Module:
        *parents, own = name.split(".")
        within: nn.Module = self
        for parent in parents:
            if parent not in within._modules:
                within.add_module(parent, nn.Module())
            within = within.get_submodule(parent)
        within.add_module(own, part)
        return part

    def get_input_embeddings(self) -> nn.Module:
        return self.get_submodule(_TABLE)

    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule(_HEAD)

    @functools.cached_property
    def _own(self) -> list[Any]:
        """transformers' model, in a list: a module that is an attribute would be a part."""
        quiet_libraries()
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        with quiet_warnings(), ONE_AT_A_TIME:
            config = AutoConfig.from_pretrained(str(self._folder))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, values in self._vectors.items():
                parent, _, part = name.rpartition(".")
                setattr(model.get_submodule(parent), part, nn.Parameter(values, requires_grad=False))
            for name in self._packed:
                model.set_submodule(name, self.get_submodule(name))
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
            if (self._folder / _GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(str(self._folder))
        return [model.eval()]

    @property
    def whole(self) -> Any:
        """The same in transformers, over the same layers."""
        return self._own[0]

    def forward(self, *given: Any, **named: Any) -> Any:
        """transformers' own pass."""
        return self.whole(*given, **named)

    def unpacked(self) -> Any:
        """transformers' model with plain layers of the same numbers."""
        return unpacked_copy(self.whole)


class _Rotary(nn.Module):
    """Turns queries and keys by inv_freq [D/2], under the names that transformers has for it."""

    def __init__(self, inverse: Tensor, scaling: float) -> None:
        super().__init__()
        self.attention_scaling = scaling
        self.register_buffer("inv_freq", inverse, persistent=False)


def head_size(config: Any) -> int:
    """Numbers of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def packed_model(config: FileConfig, entry: Path, folder: Path) -> tuple[PackedModel, str] | None:
    """The model of `config` over the packed weights in `entry`, and their commonest type; None if it has other parts
    than the file. `folder` is the converted model's, for what is said about generation."""
    index = json.loads((entry / "index.json").read_text(encoding="utf-8"))
    if config.model_type != index["architecture"] or not _whole(config, {*index["weights"], *index["vectors"]}):
        return None
    data = np.memmap(entry / "weights.bin", np.uint8, mode="r")
    vectors, weights = {}, {}
    for name, said in index["vectors"].items():
        vectors[name] = torch.from_numpy(data[said["at"] : said["at"] + 4 * said["size"]].view(np.float32).copy())
    for name, said in index["weights"].items():
        *shape, count = said["shape"]
        part = data[said["at"] : said["at"] + int(np.prod(shape))].reshape(shape)
        weights[name] = PackedWeight(part, LAYOUTS[said["layout"]], count)
    weights.setdefault(_HEAD, weights[_TABLE])
    file = folder / _GENERATION
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return PackedModel(config, FileConfig(**said), folder, weights, vectors), str(index["type"])


def _whole(config: FileConfig, have: set[str]) -> bool:
    """Whether these are the names of all weights and vectors of a model; biases of queries, keys and values may be."""
    maps = {name for name in _INSIDE.values() if not name.endswith("norm")}
    norms = {f"{name}.weight" for word, name in _INSIDE.items() if name.endswith("norm")}
    own = {f"{_INSIDE[word]}.weight" for word in ("attn_q_norm", "attn_k_norm")}  # of each head
    biases = {f"{_INSIDE[word]}.bias" for word in ("attn_q", "attn_k", "attn_v")}
    each = maps | (norms if config.model_type == "qwen3" else norms - own)
    each |= biases if config.model_type == "qwen2" else set()

    def of_all(names: set[str]) -> set[str]:
        return {f"model.layers.{layer}.{name}" for layer in range(config.num_hidden_layers) for name in names}

    needed = of_all(each) | {_TABLE, "model.norm.weight"}
    return needed <= have <= needed | {_HEAD} | of_all(biases)


def weight_bytes(model: Any) -> int:
    """Bytes of a model's packed weights, shared ones once."""
    return sum(one.data.nbytes for one in _packed(model))


def weight_count(model: Any) -> int:
    """How many weights they are."""
    return sum(one.in_features * one.out_features for one in _packed(model))


def _packed(model: Any) -> set[PackedWeight]:
    return {part.packed for part in model.modules() if isinstance(getattr(part, "packed", None), PackedWeight)}
