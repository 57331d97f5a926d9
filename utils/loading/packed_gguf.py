"""A GGUF file's weights without expanding them: packed for the kernels once and kept in the cache.

The first load reads the file's blocks (utils/kernels/quantized_linear.py) and writes one file of packed weights, which
every load reads into one array. On Linux numpy asks for large pages for it: a pass reads all weights, and with pages of
4 kB it spends a fifth to a third of its time on finding them. A file whose architecture or types the kernels do not
know is loaded as float32; one whose tensors do not fit its configuration is refused.

A packed model has the parts and the configuration that the compiled pass reads. transformers, whose model classes take
longer to import than all else, is imported only where its own model is needed (`PackedModel.whole`), which includes
rotary frequencies that utils/families.py does not compute.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from utils.catalogue.specs import ModelSpec
from utils.errors import UnfitError
from utils.families import FAMILIES, facts_of, frequencies, rules_of
from utils.files import read_object, replacing, write_json
from utils.gguf.header import ARCHITECTURES, HEAD, TABLE, GgufHeader, TensorInfo, module_name, read_header
from utils.kernels.bindings import TYPES, load
from utils.kernels.build import why_not
from utils.kernels.quantized_linear import (
    PackedWeight,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    unpacked_copy,
)
from utils.loading.cache import cache_folder, check_disk, check_memory, filled, writing
from utils.loading.loaded import LoadOptions
from utils.loading.quiet import quiet_libraries, quiet_warnings
from utils.loading.sources import digest_of, gguf_file
from utils.objects import HfConfig, HfModel, Json
from utils.progress import SILENT, Progress

FORMAT = 3  # raised whenever a file is packed differently
_PERMUTED = ("llama", "granite", "smollm3")  # llama.cpp permutes the rows of their queries and keys
_SMALLER = "take a file of it with fewer bits, or a smaller model"

_GENERATION = "generation_config.json"
_EXPERTS = ".mlp.experts"

# transformers swaps functions of its classes while it builds a model: two threads at once leave them swapped.
ONE_AT_A_TIME = threading.Lock()


class FileConfig(SimpleNamespace):
    """A configuration file's content as attributes, as transformers' configurations have it, without defaults."""

    is_encoder_decoder = False

    def get_text_config(self, decoder: bool = False) -> "FileConfig":
        return self

    def to_dict(self) -> Json:
        return dict(vars(self))


def config_in(folder: Path) -> FileConfig | None:
    """Return the configuration of a converted model, which has every key of its family; None for families that no
    compiled pass knows."""
    stored = read_object(folder / "config.json")
    return FileConfig(**stored) if stored["model_type"] in FAMILIES else None


def entry_of(spec: ModelSpec, config: HfConfig, options: LoadOptions, progress: Progress = SILENT) -> Path:
    """Return the cache entry with the packed weights of a GGUF file of this configuration, written if missing.

    Raises UnfitError if it must be loaded as float32, UserError, Cancelled.
    """
    facts_of(config)
    make_kernels(progress)
    return packed_entry(partial(gguf_file, spec, options, progress), digest_of(spec, progress), progress)


def make_kernels(progress: Progress) -> None:
    """Load the kernels, compiled once with a line of progress. UnfitError if there are none."""
    folder, text = cache_folder() / "compiled", "compiling the kernels, once on this machine"
    if not load(folder, lambda: progress(text), lambda: progress(f"waiting: another process is {text}")):
        raise UnfitError(why_not())


def packed_entry(source: Callable[[], Path], digest: str, progress: Progress = SILENT) -> Path:
    """Return the cache entry with the packed weights of the GGUF file with sha256 `digest`, created if missing.

    UnfitError if the file cannot be packed.
    """

    def fill(folder: Path) -> None:
        with writing(folder):
            _write(source(), folder, progress)

    entry, origin = cache_folder() / "packed" / digest[:16], {"sha256": digest, "format": FORMAT}
    return filled(entry, origin, fill, progress)


class _Tensor(NamedTuple):
    """A tensor of a GGUF file, the `name` of its module and its `part` there (weight or bias); `vector`: kept as
    float32 numbers."""

    info: TensorInfo
    name: str
    part: str
    vector: bool

    def data(self) -> np.ndarray:
        """Return rows [N, bytes of a row], or a vector's numbers."""
        return self.info.floats() if self.vector else self.info.read().reshape(math.prod(self.info.shape[:-1]), -1)


def _tensors(header: GgufHeader) -> tuple[dict[str, int], list[_Tensor]]:
    """Return the number of heads of each projection whose rows llama.cpp permuted, and the tensors. UnfitError for a
    tensor that the kernels cannot use."""
    metadata, architecture = header.metadata, header.architecture
    if architecture not in ARCHITECTURES:
        raise UnfitError(f"no compiled pass computes {architecture}")
    tensors = []
    for info in header.parameters:
        name, part = module_name(info.name, architecture)
        # Routers and shared experts' gates are small and stay float32.
        vector = name.endswith(("mlp.gate", "mlp.shared_expert_gate")) or (info.kind == "F32" and len(info.shape) == 1)
        packs = info.kind in TYPES and len(info.shape) == (3 if _EXPERTS in name else 2) and part == "weight"
        if not (vector or packs):
            raise UnfitError(f"no kernel for {info.kind}, the type of {info.name}")
        tensors.append(_Tensor(info, name, part, vector))
    if architecture not in _PERMUTED:
        return {}, tensors
    heads = metadata[f"{architecture}.attention.head_count"]
    return {"attn_q": heads, "attn_k": metadata.get(f"{architecture}.attention.head_count_kv", heads)}, tensors


def _write(source: Path, folder: Path, progress: Progress) -> None:
    """Write `weights.bin`, packed weights and float32 vectors one after another, and their offsets in `index.json`."""
    header = read_header(source)
    heads, tensors = _tensors(header)
    above_one = FAMILIES[ARCHITECTURES[header.architecture]].gain_above_one  # the file stores 1 + w
    needed = 1.05 * sum(tensor.info.size for tensor in tensors)  # a packed weight takes at most this much more
    check_memory(source.name, needed, _SMALLER)
    check_disk(f"packing {source.name}", needed, folder)
    weights: Json = {}
    vectors: Json = {}
    types: Counter[str] = Counter()
    with replacing(folder / "weights.bin") as out:

        def put(data: np.ndarray) -> int:
            out.write(b"\0" * (-out.tell() % 64))  # a weight begins at a multiple of 64 bytes
            start = out.tell()
            out.write(np.ascontiguousarray(data).data)
            return start

        for done, tensor in enumerate(tensors):
            progress(f"packing {source.name}", done / len(tensors))
            data = tensor.data()
            if permuted := heads.get(tensor.info.name.split(".")[-2]):
                if len(data) % (2 * permuted):
                    raise UnfitError(f"{tensor.info.name} has {len(data)} rows for {permuted} heads")
                # from llama.cpp's order of a head's rows, in pairs, to transformers' halves
                data = data.reshape(permuted, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
            if tensor.vector:
                if above_one and tensor.name.endswith("norm"):
                    data = data - 1
                vectors[f"{tensor.name}.{tensor.part}"] = {
                    "at": put(data),
                    "shape": (1, *data.shape) if tensor.name.endswith("expert_gate") else data.shape,
                }
                continue
            packed = PackedWeight.of(tensor.info.kind, data, progress.check)
            weights[tensor.name] = {
                "at": put(packed.data),
                "shape": [*packed.data.shape, packed.out_features, packed.in_features],
                "kind": packed.kind,
            }
            types[packed.kind] += packed.data.size
            del packed
    write_json(folder / "index.json", {"type": types.most_common(1)[0][0], "weights": weights, "vectors": vectors})


class PackedModel(nn.Module):
    """The parts of a Llama-like model over packed weights, under transformers' names.

    sampling/models/fused.py runs them as one compiled pass. `counted` is the number of its parameters, `whole`
    transformers' own model over the same layers, built at its first use, `unpacked()` a new plain one with the same
    numbers.
    """

    own_head = False

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
        self._vectors, facts = vectors, facts_of(config)
        self._place("model.layers", nn.ModuleList(nn.Module() for _ in range(config.num_hidden_layers)))
        mixtures: dict[str, dict[str, PackedWeight]] = {}
        for name, packed in weights.items():
            parent, _, part = name.rpartition(".")
            if parent.endswith(_EXPERTS):
                mixtures.setdefault(parent, {})[part] = packed
            elif name == TABLE:
                self._place(
                    name,
                    QuantizedEmbedding(packed, facts.scalars["embed_scale"] if facts.family.scaled_embeddings else 1.0),
                )
            else:
                self._place(name, QuantizedLinear(packed, vectors.get(f"{name}.bias")))
        for name, parts in mixtures.items():
            self._place(name, QuantizedExperts.of(parts, int(facts.scalars["experts"])))
        for name, values in vectors.items():
            parent, _, part = name.rpartition(".")
            if parent not in weights:
                self._place(parent, nn.Module()).register_parameter(part, nn.Parameter(values, requires_grad=False))
        self._packed = [name for name, part in self.named_modules() if name and hasattr(part, "unpacked")]
        trunk: HfModel = self.get_submodule("model")
        tables: Json = {kind: frequencies(rule, facts.rotary_dim) for kind, rule in rules_of(config).items()}
        if None in tables.values():
            trunk.rotary_emb = self.whole.model.rotary_emb
        else:  # under the names of transformers' module
            trunk.rotary_emb = SimpleNamespace()
            for kind, (frequency, scaling) in tables.items():
                prefix = f"{kind}_" if kind else ""
                vars(trunk.rotary_emb).update({f"{prefix}inv_freq": frequency, f"{prefix}attention_scaling": scaling})
        self.counted = sum(weight.in_features * weight.out_features for weight in {*weights.values()})
        self.counted += sum(vector.numel() for vector in self.parameters())
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
        return self.get_submodule(TABLE)

    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule(HEAD)

    @cached_property
    def whole(self) -> HfModel:
        """transformers' model over the same layers; not a submodule of this one."""
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
                packed = self.get_submodule(name)
                if isinstance(packed, QuantizedExperts):
                    packed.plain = [model.get_submodule(name)]
                model.set_submodule(name, packed)
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
            if (self._folder / _GENERATION).is_file():
                model.generation_config = GenerationConfig.from_pretrained(str(self._folder))
        return model.eval()

    def forward(self, *given: object, **named: object) -> object:
        """transformers' own pass."""
        return self.whole(*given, **named)

    def unpacked(self) -> HfModel:
        """transformers' model with plain layers of the same numbers."""
        return unpacked_copy(self.whole)


def packed_model(config: FileConfig, entry: Path, folder: Path, name: str) -> PackedModel:
    """Return the model of `config` over the packed weights in `entry`. `folder`: the converted model's, which has its
    generation configuration."""
    index, ends = read_object(entry / "index.json"), folder / _GENERATION
    check_memory(name, (entry / "weights.bin").stat().st_size, _SMALLER)
    data = np.fromfile(entry / "weights.bin", np.uint8)
    vectors = {
        tensor: torch.from_numpy(np.ndarray(span["shape"], np.float32, data, span["at"]).copy())
        for tensor, span in index["vectors"].items()
    }
    weights = {}
    for tensor, span in index["weights"].items():
        *shape, rows, width = span["shape"]
        weights[tensor] = PackedWeight(np.ndarray(shape, np.uint8, data, span["at"]), span["kind"], rows, width)
    weights.setdefault(HEAD, weights[TABLE])
    generation = read_object(ends) if ends.is_file() else {}
    return PackedModel(config, FileConfig(**generation), folder, weights, vectors)


def packed_weights(model: HfModel) -> set[PackedWeight]:
    """Return a model's packed weights, shared ones once."""
    packed = {part.packed for part in model.modules() if isinstance(getattr(part, "packed", None), PackedWeight)}
    mixtures = [part.experts for part in model.modules() if isinstance(part, QuantizedExperts)]
    return packed.union(weight for experts in mixtures for weights in experts for weight in weights)
