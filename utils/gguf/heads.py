"""A draft head in a GGUF file → a folder in its authors' format, which is read as any published head.

Architectures, keys and names are those of llama.cpp's converter (conversion/llama.py and conversion/qwen.py, the tables
of gguf-py/gguf/constants.py, src/models/eagle3.cpp and dflash.cpp; the release that llama-cpp-python 0.3.36 ships):

* `eagle3`: `target_layers` (`extract_layers` in older files) number the layers whose input the head reads. The rows
  of queries and keys are permuted as in Llama's files: two that are rotated together are adjacent.
* `dflash`, which DSpark and DFlash2 share: `target_layers` number inputs too: each is one more than the number of
  the output in z-lab's format. A file with `markov_w1` is DSpark's, one with `selector_hidden` DFlash2's. Older files
  of DSpark's are called `dspark`.
* `d2t` holds the target's ids, not their distances from the draft ids.
* `gemma4-assistant` becomes a folder of transformers', with floats.

A matrix keeps its bits: it is stored as the rows of the file, uint8 [rows, bytes], under its name and type, such as
`fc.weight.q4_k`. Knows neither modules nor targets; what it cannot express is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.errors import UnfitError, UserError
from utils.gguf.facts import check_known, scaling
from utils.gguf.header import TOKENS, GgufHeader, TensorInfo, dequantized, module_name
from utils.kernels.bindings import FLOATS, TYPES, load
from utils.kernels.quantized_linear import PackedWeight
from utils.objects import Json

_DFLASH = {
    **{"enc.output_norm": "hidden_norm", "markov_w1": "markov_head.markov_w1", "markov_w2": "markov_head.markov_w2"},
    **{"conf_proj": "confidence_head.proj", "selector_hidden": "candidate_selector.hidden_projection"},
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    **{"attn_conv_base": "attention_conv.base_kernel", "attn_conv_proj": "attention_conv.kernel_projection"},
    **{"ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj": "mlp_conv.kernel_projection"},
}
_NAMES = {  # architectures → their names of tensors that models lack, and the published ones
    "eagle3": {"enc.output_norm": "input_norm", "attn_norm_2": "hidden_norm"},
    "dflash": _DFLASH,
    "dspark": _DFLASH,
    "gemma4-assistant": {
        **{"nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection"},
        "layer_output_scale": "layer_scalar",
    },
}
_BARE = ("codebook", "base_kernel", "layer_scalar")  # ends of names that no "weight" follows
_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # DFlash2's
_KEYS = {
    *("target_layers", "extract_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc", "block_size"),
    *("sample_from_anchor", "has_confidence_head", "markov_rank", "mask_token_id", "attention.causal", *_SIZES),
    *(
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
    ),
}


def write_head(header: GgufHeader, folder: Path) -> None:
    """Write the head's `config.json` and `model.safetensors`. UserError, in one line, for what cannot be read."""
    from safetensors.torch import save_file

    file, tensors, order = header.parts[0].name, dict[str, Tensor](), None
    if listed := next((info for info in header.tensors if info.name == "d2t"), None):
        ids = torch.from_numpy(listed.read().view(np.int64 if listed.kind == "I64" else np.int32)).long()
        order = ids.argsort().numpy()
        tensors["d2t"] = ids[order] - torch.arange(len(ids))
    for info in header.parameters:
        if info is not listed:
            name = _published(info.name, header.architecture, file)
            heads = {"attn_q": _said(header, "attention.head_count"), "attn_k": _shared(header)}
            permuted = heads.get(info.name.split(".")[-2], 0) if header.architecture == "eagle3" else 0
            # With a row for each id of the reduced vocabulary:
            by_list = name.rpartition(".")[0] in ("lm_head", "markov_head.markov_w2")
            if header.head == "assistant":
                outside = name.startswith(("pre_projection", "post_projection"))
                tensors[name if outside else f"model.{name}"] = torch.from_numpy(info.floats())
            else:
                tensors |= dict([stored(name, info, permuted, order if by_list else None)])
    (folder / "config.json").write_text(
        json.dumps({"assistant": _assistant, "eagle": _eagle}.get(header.head, _block)(header), indent=2) + "\n",
        encoding="utf-8",
    )
    save_file(tensors, folder / "model.safetensors")


def _said(header: GgufHeader, *keys: str) -> Any:
    """Return the value of the first of these keys that the file has. UserError if it has none."""
    for key in keys:
        if (value := header.get(key)) is not None:
            return value
    raise UserError(f"{header.parts[0].name} does not say {header.architecture}.{keys[0]}")


def _shared(header: GgufHeader) -> Any:
    return header.get("attention.head_count_kv", _said(header, "attention.head_count"))


def _published(name: str, architecture: str, file: str) -> str:
    """Return the published name of a tensor; those of DFlash2's codebooks and kernels do not end in `weight`."""
    part = "bias" if name.endswith(".bias") else "weight"
    layer, own = "", name.removesuffix(f".{part}")
    if own.startswith("blk."):
        _, number, own = own.split(".", 2)
        layer = f"layers.{number}."
    if known := _NAMES[architecture].get(own) or ("fc" if own == "fc" else None):
        return f"{layer}{known}" + ("" if known.endswith(_BARE) else f".{part}")
    try:
        return ".".join(module_name(name, architecture)).removeprefix("model.")
    except UnfitError:
        raise UserError(f"{file} has {name}, which no {architecture} head that is read has") from None


def stored(name: str, info: TensorInfo, permuted: int = 0, order: np.ndarray | None = None) -> tuple[str, Tensor]:
    """Return a tensor of a file as a folder has it: floats, or a matrix's rows [N, bytes] under a name with its type.

    `permuted`: the number of heads of a matrix whose rows llama.cpp permuted, which are put back into transformers'
    order; 0: it permuted none. `order`: the new order of the rows.
    """
    kept = info.kind in {*TYPES} - {*FLOATS} and len(info.shape) == 2 and name.endswith(".weight")
    rows = info.read().reshape(info.shape[0], -1) if kept else info.floats()
    if permuted:
        rows = rows.reshape(permuted, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    rows = np.ascontiguousarray(rows if order is None else rows[order])
    return f"{name}.{info.kind.lower()}" if kept else name, torch.from_numpy(rows)


def unstored(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, PackedWeight]]:
    """Return tensors of such a folder by their names, rows of a type as floats [N, K], and the kernels' packed weights.

    A weight that is packed has no memory among the tensors; without kernels none is packed, and all are floats.
    """
    floats, packed = dict[str, Tensor](), dict[str, PackedWeight]()
    for name, value in tensors.items():
        own, _, kind = name.rpartition(".")
        if value.dtype != torch.uint8 or kind.upper() not in TYPES:
            floats[name] = value
        elif load():
            packed[own] = weight = PackedWeight.of(kind.upper(), value.numpy())
            floats[own] = torch.empty(weight.out_features, weight.in_features, device="meta")
        else:
            floats[own] = torch.from_numpy(dequantized(value.numpy(), kind.upper()))
    return floats, packed


def _shape(header: GgufHeader) -> Json:
    """Return the keys of the configuration that all heads have."""
    check_known(header, _KEYS)
    heads, width, context = (
        _said(header, key) for key in ("attention.head_count", "embedding_length", "context_length")
    )
    size = header.get("attention.key_length") or header.get("rope.dimension_count") or width // heads
    if header.get("rope.dimension_count", size) != size:
        raise UserError(f"{header.parts[0].name} turns a part of its heads, which is not read")
    return {
        "gguf": header.architecture,
        "hidden_act": "silu",
        "vocab_size": header.get("vocab_size") or len(header.metadata.get(TOKENS, ())),
        "hidden_size": width,
        "intermediate_size": _said(header, "feed_forward_length"),
        "num_hidden_layers": _said(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _shared(header),
        "head_dim": size,
        "max_position_embeddings": context,
        "rms_norm_eps": _said(header, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": header.get("rope.freq_base", 10000.0),
            **scaling(SimpleNamespace(max_position_embeddings=context), header, header.factors(), size // 2),
        },
        "speculators_config": {"verifier": {"name_or_path": header.metadata.get("general.base_model.0.name")}},
    }


def _eagle(header: GgufHeader) -> Json:
    return {
        **_shape(header),
        "model_type": "llama",
        "eagle_aux_hidden_state_layer_ids": _said(header, "target_layers", "extract_layers"),
        "target_hidden_size": header.get("target_hidden_size"),
        "norm_before_residual": header.get("norm_before_residual", False),
        "norm_before_fc": header.get("norm_before_fc", False),
    }


def _block(header: GgufHeader) -> Json:
    """Return the configuration of a DFlash, DSpark, DFlash2 or JetSpec head."""
    window = header.get("attention.sliding_window") or 0
    pattern = header.get("attention.sliding_window_pattern", [bool(window)] * _said(header, "block_count"))
    shapes = {info.name: info.shape for info in header.tensors}
    markov, confidence = (shapes.get(f"{name}.weight") for name in ("markov_w1", "conf_proj"))
    reads = {
        "target_layer_ids": [layer - 1 for layer in _said(header, "target_layers")],
        "mask_token_id": header.metadata.get("tokenizer.ggml.mask_token_id", header.get("mask_token_id")),
    }
    config = {
        **_shape(header),
        "model_type": "qwen3",
        "layer_types": ["sliding_attention" if windowed and window else "full_attention" for windowed in pattern],
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "block_size": header.get("block_size", 16),
        "causal_head": header.get("attention.causal", False),
        "sample_from_anchor": markov is not None and header.get("sample_from_anchor", True),
    }
    if markov is None:
        sizes = {name: header.get(name) for name in _SIZES if header.get(name) is not None}
        return {**config, "dflash_config": {**reads, **sizes}}
    return {
        **{**config, **reads, "enable_confidence_head": confidence is not None},
        "confidence_head_with_markov": (confidence is not None and confidence[-1] > _said(header, "embedding_length")),
        "markov_rank": markov[-1],
    }


_OF_ASSISTANTS = {
    *("embedding_length_out", "nextn_predict_layers", "attention.shared_kv_layers", "final_logit_softcapping"),
    *("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
}


def _assistant(header: GgufHeader) -> Json:
    """Return transformers' configuration of a Gemma 4 assistant (conversion/gemma.py, `Gemma4AssistantModel`).

    Layers without a window have larger heads, of which `rope_freqs` says which part is rotated.
    """
    check_known(header, {*_KEYS, *_OF_ASSISTANTS})
    layers = _said(header, "block_count")
    windowed, shared = _said(header, "attention.sliding_window_pattern"), _shared(header)
    keys = [shared] * layers if isinstance(shared, int) else shared
    factors = header.factors().get("rope_freqs.weight", [1.0])
    full = {"head_dim": _said(header, "attention.key_length")}
    text = {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in windowed],
        "num_hidden_layers": layers,
        "num_kv_shared_layers": header.get("attention.shared_kv_layers", layers),
        "hidden_size": _said(header, "embedding_length"),
        "intermediate_size": _said(header, "feed_forward_length"),
        "num_attention_heads": _said(header, "attention.head_count"),
        "num_key_value_heads": keys[windowed.index(True)] if True in windowed else keys[0],
        "head_dim": _said(header, "attention.key_length_swa"),
        "per_layer_config": {
            str(at): {**full, "num_key_value_heads": keys[at]} for at in range(layers) if not windowed[at]
        },
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "proportional", "rope_theta": _said(header, "rope.freq_base")},
                "partial_rotary_factor": factors.count(1.0) / len(factors),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10000.0)},
        },
        "sliding_window": _said(header, "attention.sliding_window"),
        "max_position_embeddings": _said(header, "context_length"),
        "rms_norm_eps": _said(header, "attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "vocab_size": len(header.metadata.get(TOKENS, ())),
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "tie_word_embeddings": True},
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": _said(header, "embedding_length_out"),
        "text_config": text,
        **{"use_ordered_embeddings": False, "tie_word_embeddings": True, "dtype": "float32"},
    }
