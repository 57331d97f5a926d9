"""Draft heads on disk: a folder with `config.json` and `model.safetensors`, 16 bit, in the published GLIDE names, or of
EAGLE-3, DFlash and DSpark heads in their published format; or its matrices in 4 bits, as a GGUF file's Q4_1 has them.

Tensors of the target (embedding, rows of the head) are not stored again: the configuration has `shared_embedding` and
`shared_head`, and loading takes them from the target. Published GLIDE checkpoints are read too, from a folder (one file
or shards, safetensors or .bin) or as a loaded module, and published EAGLE and block heads (published.py), also those of
GGUF files, whose matrices keep their bits (utils/gguf/heads.py);
values that their configuration leaves out follow from the weights and the target. A draft head of another target, an
incomplete or a damaged folder is refused by name. Knows no training and no sessions.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sampling.drafters.draft_heads.config import BlockConfig, DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.published import (
    as_published,
    check_verifier,
    has_place,
    our_name,
    require,
    translated,
    translated_block,
)
from utils.catalogue.catalogue import FORMAT, head_kind
from utils.catalogue.heads import BLOCK_KINDS, HEAD_KINDS, PUBLISHED_KINDS
from utils.errors import UserError, is_count
from utils.families import head_size
from utils.files import read_object, replacing
from utils.gguf.heads import unstored
from utils.kernels.bindings import GROUP
from utils.kernels.quantized_linear import (
    PackedWeight,
    QuantizedEmbedding,
    QuantizedLinear,
    layer_over,
    rounded_rows,
)
from utils.loading.sources import check_weights, weight_files
from utils.objects import HfModel, Json, nested

CONFIG, WEIGHTS = "config.json", "model.safetensors"
IDS = "lm_head.ids"  # of the reduced vocabulary
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FOUR_BITS = ".q4_1"  # after the name of a matrix in 4 bits
_OPTIONAL = ("output_bias", "mlp_bias")  # keys that older folders lack: their heads have neither bias
_LAYERS, _LAYER = "model.layers.", "model.layers.0."
_CROSS = f"{_LAYER}cross_attn.q_proj.weight"  # only GLIDE heads have it


def save_student(folder: str | Path, student: DraftHead, about: Json | None = None) -> int:
    """Write the folder and return the bytes of its weights; each file appears whole or not at all.

    `about` joins the configuration: `tokenizer` (a fingerprint), `target`, figures …; with `bits` 4 the matrices are
    rounded. EAGLE-3, DFlash and DSpark heads are written in the published format if that can hold them
    (:func:`has_place`). Raises OSError (a full disk) with an earlier version of the files left as it was.
    """
    folder, about = Path(folder), about or {}
    folder.mkdir(parents=True, exist_ok=True)
    config, shape = student.config, asdict(student.config)
    shared = {_EMBEDDING: config.shared_embedding, _HEAD: config.shared_head}
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in student.state_dict().items()
        if not shared.get(name)
    }
    if about.get("bits") == 4:
        tensors = dict(_in_four_bits(name, value) for name, value in tensors.items())
    if config.short_list:
        tensors[IDS] = student.ids.to("cpu", torch.int32).contiguous()
    if has_place(shape, about):
        stored, tensors = as_published(shape, tensors, about)
    else:
        stored = {
            "student": FORMAT,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            **shape,
            **about,
        }
    data = save(tensors, metadata={"format": "pt"})
    stored |= {"bytes": len(data), "crc32": zlib.crc32(data)}
    with replacing(folder / WEIGHTS) as weights, replacing(folder / CONFIG) as description:
        weights.write(data)
        weights.flush()
        os.fsync(weights.fileno())  # after it nothing can fail, and both files are renamed
        description.write((json.dumps(stored, indent=2) + "\n").encode("utf-8"))
    return len(data)


def load_student(
    folder: str | Path, target: nn.Module | None = None, fingerprint: str | None = None, name: str | None = None
) -> DraftHead:
    """Return the draft head in `folder`, its shared parts taken from `target` (a transformers causal model). It is in
    float32; matrices of GGUF files, and a target's embedding that has fewer bits, stay as they are.

    Reads the published formats as well: GLIDE's (Llama's keys and names, with cross-attention), EAGLE's and those of
    block heads. `fingerprint` is that of the target's tokenizer (utils/loading/fit.py); with a target, a head that
    names its tokenizer needs it. `name` is the target's hub id; None: it is not compared.

    Raises:
        UserError: a missing or damaged file, a draft head of another target, in one line that names it.
    """
    folder = Path(folder)
    stored = read_config(folder)
    tokenizer, own = stored.get("tokenizer"), fingerprint or "not given: fingerprint(tokenizer) of utils.loading.fit"
    require(
        tokenizer in (None, fingerprint) or (target is None and fingerprint is None),
        folder,
        f" was made for another tokenizer ({tokenizer}, the target's is {own})",
    )
    own_format = stored.get("student") == FORMAT
    _check_complete(stored, own_format, folder)
    tensors, packed = unstored(_tensors(folder, stored))
    kind = None if own_format else head_kind(folder)
    if kind not in PUBLISHED_KINDS:
        return _fitted(stored if own_format else _completed(stored, tensors, target, folder), tensors, folder, target)
    require(target is not None, folder, " is for a target: it cannot be used without it")
    check_verifier(stored, name, folder)
    large: HfModel = target.config.get_text_config()  # type: ignore[operator, union-attr]
    try:
        if kind in ("eagle", "peagle"):
            stored, tensors = translated(stored, tensors, large, folder)
        else:
            stored, tensors = translated_block(kind, stored, tensors, large, folder)
        packed = {our_name(name): weight for name, weight in packed.items()}
        return _built(_config(stored, folder), tensors, folder, target, packed)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a field of another type
        raise UserError(f"the drafter {folder} cannot be read: {type(error).__name__}: {error}") from error


def head_of(module: nn.Module, target: nn.Module) -> DraftHead:
    """Return the draft head of a loaded GLIDE module: its weights by their published names, its `config` completed.

    The module does not change; its float32 tensors are shared. UserError for a module that is no head for `target`.
    """
    folder, config = Path(type(module).__name__), getattr(module, "config", {})
    tensors = {name: value.detach() for name, value in module.state_dict().items()}
    if _CROSS not in tensors:
        raise UserError(f"{folder} is no GLIDE drafter: it has no {_CROSS}")
    stored = dict(config.to_dict() if hasattr(config, "to_dict") else config)
    return _fitted(_completed(stored, tensors, target, folder), tensors, folder, target)


def _fitted(stored: Json, tensors: dict[str, Tensor], folder: Path, target: nn.Module | None) -> DraftHead:
    """Build a head of our own format or a GLIDE head. UserError if it cannot draft for `target`."""
    config = _config(stored, folder)
    if target is not None:
        check_target(config, target, folder)
    return _built(config, tensors, folder, target)


def _built(
    config: DraftHeadConfig,
    tensors: dict[str, Tensor],
    folder: Path,
    target: nn.Module | None,
    packed: Mapping[str, PackedWeight] = {},  # read only
) -> DraftHead:
    """Build a draft head of tensors by their stored names. `packed`: the weights among them that keep their bits."""
    ids = _ids(tensors.pop(IDS, None), config, folder)
    with torch.device("meta"), _Uninitialised():  # no memory for parameters that are replaced
        student = DraftHead(config, ids)
    student.adopt(ids, target_rotary(target))
    # Older Llama checkpoints store the rotary frequencies as well; they follow from the configuration.
    tensors = {name: value for name, value in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    tensors |= _shared(config, student, target, folder)
    wanted, unfit = student.state_dict(), f"the drafter {folder / WEIGHTS} does not fit its config.json:"
    for name, value in tensors.items():
        if name in wanted and wanted[name].shape != value.shape:
            raise UserError(f"{unfit} {name} is {tuple(value.shape)}, not {tuple(wanted[name].shape)}")
    missing, surplus = student.load_state_dict(
        {name: value.float() for name, value in tensors.items()}, strict=False, assign=True
    )
    if missing or surplus:
        raise UserError(f"{unfit} it {f'lacks {missing[0]}' if missing else f'has {surplus[0]}, which nothing reads'}")
    for name, weight in packed.items():
        own = name.removesuffix(".weight")
        student.set_submodule(own, layer_over(student.get_submodule(own), {"weight": weight}))
    if config.shared_embedding and isinstance(table := cast(Any, target).get_input_embeddings(), QuantizedEmbedding):
        cast(Any, student.model).embed_tokens = table  # target and head share the packed table
    return student.eval().requires_grad_(False)


class _Uninitialised(TorchFunctionMode):
    """Skip torch.nn.init: on the meta device it would import torch's compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


def _completed(stored: Json, tensors: dict[str, Tensor], target: nn.Module | None, folder: Path) -> Json:
    """Return a published configuration with missing sizes taken from the weights, and missing `large_…` from the
    target."""
    config = {name: value for name, value in stored.items() if value is not None}
    sizes = {
        "vocab_size": (_EMBEDDING, 0),
        "hidden_size": (_EMBEDDING, 1),
        "intermediate_size": (f"{_LAYER}mlp.gate_proj.weight", 0),
    }
    for key, (name, dim) in sizes.items():
        if name in tensors and tensors[name].dim() == 2:
            config.setdefault(key, tensors[name].shape[dim])
    config.setdefault("num_hidden_layers", len({name.split(".")[2] for name in tensors if name.startswith(_LAYERS)}))
    query = tensors.get(_CROSS)
    if query is None or {"large_hidden_size", "large_num_attention_heads"} <= config.keys():
        return config
    require(target is not None, folder, f": {CONFIG} has no sizes of its target (large_…): load it with its target")
    large: HfModel = target.config.get_text_config()  # type: ignore[operator, union-attr]
    size = config.setdefault("large_head_dim", head_size(large))
    config.setdefault("large_hidden_size", large.hidden_size)
    numbers = len(query)
    require(numbers % size == 0, folder, f" has queries of {numbers} numbers: no heads of the target's {size}")
    return {"large_num_attention_heads": numbers // size} | config


def read_config(folder: str | Path) -> Json:
    """Read the configuration of a draft head's folder. UserError if there is none."""
    return read_object(Path(folder) / CONFIG)


def _check_complete(stored: Json, own_format: bool, folder: Path) -> None:
    """Raise UserError if the configuration lacks a value for which a default would describe another head."""
    if own_format:
        missing = [field.name for field in fields(DraftHeadConfig) if field.name not in {*stored, *_OPTIONAL}]
    else:
        missing = ["student"] if stored.get("kind") in HEAD_KINDS else []
        missing += {"rms_norm_eps"} - (stored.get("transformer_layer_config") or stored).keys()
    if missing:
        raise UserError(f"the drafter's {folder / CONFIG} is incomplete: it does not say {', '.join(missing[:3])}")


def _config(stored: Json, folder: Path) -> DraftHeadConfig:
    """Return the configuration of our own keys, or of a Llama configuration as published GLIDE checkpoints have it."""
    config_type = BlockConfig if stored.get("kind") in BLOCK_KINDS else DraftHeadConfig
    values = {field.name: stored[field.name] for field in fields(config_type) if stored.get(field.name) is not None}
    values.setdefault("kind", "glide" if "large_num_attention_heads" in stored else "plain")
    for prefix in ("", "large_"):
        size, heads = (stored.get(prefix + name, 0) for name in ("hidden_size", "num_attention_heads"))
        if is_count(size, 1) and is_count(heads, 1):
            values.setdefault(f"{prefix}head_dim", size // heads)
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    if (theta := nested(stored, "rope_parameters", "rope_theta")) is not None:
        values.setdefault("rope_theta", theta)
    for field in fields(config_type):
        value = values.get(field.name, field.default)
        wrong = field.type is int and not is_count(value, 0 if field.default == 0 else 1)
        wrong |= field.type is float and not (isinstance(value, int | float) and value > 0)
        wrong |= field.name == "reads" and not (isinstance(value, list | tuple) and all(is_count(i, -1) for i in value))
        if wrong and value is not MISSING:
            raise UserError(f"the drafter's {folder / CONFIG} is damaged: {field.name} is {value!r}")
    try:
        return config_type(**values)
    except TypeError as error:
        raise UserError(
            f"the drafter's {folder / CONFIG} is incomplete: {str(error).split('missing')[-1].strip()}"
        ) from None
    except UserError as error:
        raise UserError(f"the drafter's {folder / CONFIG} is no draft head's: {error}") from None


def _ids(ids: Tensor | None, config: DraftHeadConfig, folder: Path) -> Tensor | None:
    """Return the stored reduced vocabulary: ascending ids, one for each row of the head. UserError otherwise."""
    count, stated = 0 if ids is None else ids.numel(), f"{CONFIG} says {config.short_list}"
    unfit = f" does not fit its config.json: {count} ids in the reduced vocabulary, {stated}"
    require(count == config.short_list, folder / WEIGHTS, unfit)
    if ids is None:
        return None
    ids = ids.flatten().long()
    if bool((ids.diff() <= 0).any()) or not 0 <= int(ids[0]) <= int(ids[-1]) < config.vocab_size:
        raise UserError(f"the drafter's weights {folder / WEIGHTS} are damaged: {IDS} is no ascending list of ids")
    return ids


def check_target(config: DraftHeadConfig, target: nn.Module, folder: str | Path) -> None:
    """Raise UserError, with both numbers, if a draft head of this shape cannot draft for `target`."""
    if config.kind == "glide" and (getattr(target, "tp_size", None) or 1) > 1:
        raise UserError("drafter glide reads all keys and values of its target: it goes with one process")
    large: HfModel = target.config.get_text_config()  # type: ignore[operator, union-attr]
    compared = [
        ("a vocabulary of", "ids", config.vocab_size, large.vocab_size, HEAD_KINDS),
        ("a target of hidden size", "", config.large_hidden_size, large.hidden_size, {*HEAD_KINDS} - {"plain"}),
        ("a target of", "heads", config.large_num_attention_heads, large.num_attention_heads, ("glide",)),
        ("a target with heads of size", "", config.large_head_dim, head_size(large), ("glide",)),
    ]
    for what, unit, theirs, ours, kinds in compared:
        require(
            config.kind not in kinds or theirs == ours,
            folder,
            f" is for {what} {theirs} {unit}".rstrip() + f", this one has {ours}",
        )
    read, deep = config.num_hidden_layers if config.kind == "glide" else 0, max(config.reads, default=0)
    layers = large.num_hidden_layers
    require(read <= layers, folder, f" reads the last {read} layers of its target, this one has {layers}")
    require(deep < layers, folder, f" reads the input of its target's layer {deep}, this one has {layers}")


def target_rotary(target: nn.Module | None) -> nn.Module | None:
    """Return the target's rotary module: a GLIDE head rotates its queries as the target rotates its keys."""
    return cast("nn.Module | None", getattr(getattr(target, "model", None), "rotary_emb", None))


def _tensors(folder: Path, stored: Json) -> dict[str, Tensor]:
    """Read all tensors of the folder, from one file or from shards. UserError if they are damaged or no floats."""
    require("quantization_config" not in stored, folder, " is quantized by another program, which is not read")
    tensors: dict[str, Tensor] = {}
    try:
        check_weights(folder, quantized=False)
        for file in weight_files(folder):
            data = file.read_bytes()
            if "crc32" in stored and (len(data), zlib.crc32(data)) != (stored.get("bytes"), stored["crc32"]):
                raise UserError(f"{file} is damaged: {len(data):,} bytes, their checksum is wrong")
            is_safe = file.suffix == ".safetensors"
            tensors |= load(data) if is_safe else torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except UserError as error:
        raise UserError(f"the drafter's weights cannot be used: {error}") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"the drafter's weights in {folder} cannot be read: {error}") from None
    return dict(_from_four_bits(name, value) for name, value in tensors.items() if isinstance(value, Tensor))


def _in_four_bits(name: str, value: Tensor) -> tuple[str, Tensor]:
    """Return a matrix in 4 bits [rows, bytes] with its name extended by `.q4_1`; other tensors unchanged."""
    if value.dim() != 2 or value.shape[1] % GROUP:
        return name, value
    return name + _FOUR_BITS, torch.from_numpy(rounded_rows(value, "Q4_1"))


def _from_four_bits(name: str, value: Tensor) -> tuple[str, Tensor]:
    """Return the matrix that :func:`_in_four_bits` stored: of each group of 32 codes a scale, a minimum, two codes a
    byte; other tensors unchanged."""
    if not name.endswith(_FOUR_BITS):
        return name, value
    groups = value.unflatten(1, (-1, GROUP // 2 + 4))
    scale, least = groups[..., :4].contiguous().view(torch.float16).float().split(1, dim=-1)
    codes = torch.cat((groups[..., 4:] & 15, groups[..., 4:] >> 4), dim=-1)
    return name.removesuffix(_FOUR_BITS), (codes * scale + least).flatten(1)


def _shared(config: DraftHeadConfig, student: DraftHead, target: HfModel, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the target (or None) that the draft head uses as its own."""
    tensors: dict[str, Tensor] = {}
    require(
        target is not None or not (config.shared_embedding or config.shared_head),
        folder,
        " shares its target's embedding: it cannot be used without it",
    )
    if config.shared_embedding:
        table = target.get_input_embeddings()
        tensors[_EMBEDDING] = (
            torch.empty(table.num_embeddings, table.embedding_dim, device="meta")
            if isinstance(table, QuantizedEmbedding)  # `_built` puts the packed module itself there
            else _gathered(table.weight)
        )
    if config.shared_head:
        output = target.get_output_embeddings()
        if config.short_list and isinstance(output, QuantizedLinear):  # only the listed rows are unpacked
            tensors[_HEAD] = output.packed.rows(student.ids)
        else:
            tensors[_HEAD] = _gathered(output.weight)[student.ids if config.short_list else ...]
    return tensors


def _gathered(weight: Any) -> Tensor:
    """Return the weight; one that is split over processes is gathered from all of them, and each calls this."""
    return cast(Tensor, weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()
