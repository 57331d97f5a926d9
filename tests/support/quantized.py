"""Small random models of every shape the compiled pass knows, their weights quantised as a GGUF file has them."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, quants
from torch import nn

from utils.kernels.bindings import load
from utils.kernels.build import instruction_set, why_not
from utils.kernels.quantized_linear import PackedWeight, layer_over
from utils.loading.cache import cache_folder

needs_kernels = pytest.mark.skipif(instruction_set() is None, reason=f"nothing is compiled here: {why_not()}")
KINDS = ("Q4_1", "Q4_0", "Q8_0", "Q5_0")  # those that the gguf package can make

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, three queries a key": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}),
    "mistral, heads of 128": (
        "Mistral",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "sliding_window": None},
    ),
    "llama, heads of 96": ("Llama", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 96}),
    "qwen2, seven queries a key": ("Qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896}),
    "qwen3, normed heads": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}),
}


def keep_code() -> None:
    """Compile once for all test processes of this machine's user; the kernels are at hand then."""
    load(cache_folder() / "compiled")


def quantized_model(shape: str, kinds: tuple[str, ...] = KINDS, tied: bool = True, layers: int = 2) -> Any:
    """A random model of this shape whose weights are of these types in turn; all of them at hand without a file."""
    family, more = SHAPES[shape]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=203,
        intermediate_size=160,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        **{"hidden_size": 192, **more},
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 3 * parameter.shape[-1] ** -0.5 * noise)
    weights = {}
    named = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Embedding)]
    for place, (name, part) in enumerate(named):
        kind = kinds[place % len(kinds)]
        weights[name] = PackedWeight.of(kind, quantised(part.weight.numpy(), kind))
    if tied:
        weights["lm_head"] = weights["model.embed_tokens"]
    put_weights(model, weights)
    return model


def put_weights(model: nn.Module, weights: Mapping[str, PackedWeight]) -> None:
    """Replace the named layers of `model`, and experts by their parameters' names, by layers over `weights`."""
    layers: dict[str, dict[str, PackedWeight]] = {}
    for name, packed in weights.items():
        parent, _, own = name.rpartition(".")
        expert = isinstance(getattr(model.get_submodule(parent), own), nn.Parameter)
        layers.setdefault(parent if expert else name, {})[own if expert else "weight"] = packed
    for name, parts in layers.items():
        model.set_submodule(name, layer_over(model.get_submodule(name), parts))


def quantised(weight: np.ndarray, kind: str) -> np.ndarray:
    """Bytes [N, …] of float32 [N, K] as the gguf package rounds it."""

    return quants.quantize(weight, GGMLQuantizationType[kind])


def dense_copy(model: Any) -> Any:
    """The same model with plain layers and the same numbers."""
    return copy.deepcopy(model, {id(part): part.unpacked() for part in model.modules() if hasattr(part, "unpacked")})


def add_tensor(writer: Any, name: str, data: np.ndarray, kind: str) -> None:
    """Add a tensor of type `kind` to a GGUF file that is being written."""
    if kind == "F32":
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, quantised(data, kind), raw_dtype=GGMLQuantizationType[kind])


def closed(writer: Any, path: Path) -> Path:
    """The GGUF file, written to its end."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
