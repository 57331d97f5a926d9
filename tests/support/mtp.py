"""Small random targets with a multi-token prediction layer beside their weights, and what transformers' own module of
such layers computes from it.

transformers' `MtpModel` joins, norms and masks; that Qwen's layers are such layers says *speculators*' `MTPLayerMixin`.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM
from transformers.modeling_layers import MtpModel

from tests.support.architectures import architecture, loaded, save
from utils.loading.build import admit_readers

_QWEN = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "post_norm": "mtp.norm",
}
_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _HEADS | _DELTA,
    "qwen3_next": _HEADS | _DELTA | {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5_moe_text": _HEADS | _DELTA | {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, **_LATENT, **_EXPERTS},
    "glm4_moe": _HEADS | _EXPERTS,
}
SHIPPING = ("qwen3_5_text", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text")


@cache
def shipped(name: str) -> tuple[Any, Any]:
    """A model of this architecture without what ships with it, and transformers' module of the layer that does."""
    model = architecture(name, **SMALL[name])
    model.config.num_mtp_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.mtp_layer_types = ["full_attention"]
    module: Any = MtpModel(model, 1).eval().requires_grad_(False)
    noise = torch.Generator().manual_seed(3)
    for weight in module.layers.state_dict().values():
        spread = 1.5 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.3
        weight.copy_(spread * torch.randn(weight.shape, generator=noise) + (weight.dim() == 1 and "qwen" not in name))
    return model, module


def tensors(name: str) -> dict[str, Tensor]:
    """The layer's tensors as they are published: each expert by itself."""
    model, module = shipped(name)
    behind, found = f"model.layers.{model.config.num_hidden_layers}", dict[str, Tensor]()
    for key, value in module.layers[0].state_dict().items():
        part, _, rest = key.partition(".")
        if "qwen" in name:
            stored = f"mtp.layers.0.{rest}" if part == "mtp_block" else f"{_QWEN[part]}.{rest}"
        else:
            outside = {"mtp_block": behind, "post_norm": f"{behind}.shared_head.norm"}
            stored = f"{outside.get(part, f'{behind}.{part}')}.{rest}"
        base, _, last = stored.rpartition(".")
        if not base.endswith(".experts"):
            found[stored] = value.clone()
            continue
        for expert, weight in enumerate(value):
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for one, own in zip(parts, weight.chunk(len(parts)), strict=True):
                found[f"{base}.{expert}.{one}.weight"] = own.clone()
    return found


@cache
def folder_of(name: str) -> Path:
    """A folder with the model and its layer, which a file repeats embedding and head of as DeepSeek's do."""
    folder = save(shipped(name)[0], Path(mkdtemp()) / name)
    held = load_file(folder / "model.safetensors")
    layer = tensors(name)
    if "qwen" not in name:
        behind = f"model.layers.{shipped(name)[0].config.num_hidden_layers}"
        repeated = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
        layer |= {f"{behind}.{part}.weight": held[own].clone() for part, own in repeated.items() if own in held}
    save_file(held | layer, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@cache
def target_of(name: str) -> Any:
    """The model as a user's `--target` is loaded."""
    return loaded(folder_of(name))


def with_tensors(name: str, folder: Path, change: dict[str, Tensor | None]) -> Path:
    """Another folder of it, with other tensors in the place of these (None: without them)."""
    save(shipped(name)[0], folder)
    held = load_file(folder_of(name) / "model.safetensors") | change
    kept = {key: value for key, value in held.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def drafted(name: str, row: list[int], count: int) -> tuple[list[Tensor], list[int]]:
    """Logits [V] of so many greedy drafts behind `row` and the drafts, all computed anew by transformers' modules."""
    model, module = shipped(name)
    states = model(input_ids=torch.tensor([row[:-1]]), output_hidden_states=True, use_cache=False).hidden_states[-1]
    logits, path = list[Tensor](), list(row)
    for _ in range(count):
        own = module.forward_layer(
            0, states, torch.arange(1, len(path))[None], None, input_ids=torch.tensor([path[1:]])
        )
        logits.append(model.lm_head(own[0, -1]))
        path.append(int(logits[-1].argmax()))
        states = torch.cat((states, own[:, -1:]), dim=1)
    return logits, path[len(row) :]


def gemma() -> Any:
    """A small Gemma 4 of which two layers share keys and values of those before."""
    return architecture("gemma4_text", num_kv_shared_layers=2)


def assistant_folder(folder: Path, **changes: Any) -> Path:
    """A random assistant for :func:`gemma` with its tokenizer. transformers 5.23 itself builds none (utils/loading)."""
    target = gemma().config.to_dict()
    same = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "rope_parameters", "vocab_size")
    text = {name: target[name] for name in same} | {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_kv_shared_layers": 2},
        **{"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0},
        **{"vocab_size_per_layer_input": 0, "max_position_embeddings": 512},
    }
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=target["hidden_size"], **changes)
    admit_readers(type(config.get_text_config()))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: Any = Gemma4AssistantForCausalLM(config).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    return save(model, folder)
