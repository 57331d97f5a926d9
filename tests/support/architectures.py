"""Small random models of every architecture of transformers, and whether their text here is that of `generate`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.models.encoder_decoder import lm_of
from sampling.models.probe import LARGEST, small
from sampling.types import Drafter, Rows
from tests.support.runs import answers, greedy
from tests.support.tiny import noisy_copy, tiny_tokenizer
from utils.catalogue.specs import ModelSpec, PairSpec
from utils.errors import UserError
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair

LENGTH = 24  # tokens of an answer: beyond the windows and chunks of these models, which are of 12 tokens
END = 95
DECODER = {"is_decoder": True}
MADE_SO: dict[str, dict[str, Any]] = {  # where a default configuration makes no model, or not the kind of interest
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "dots1": {
        **{"head_dim": 128, "num_key_value_heads": 32, "n_routed_experts": 16, "n_shared_experts": 1},
        **{"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    },
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "n_routed_experts": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 32},  # else a pass takes a second
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16, "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 16, "sliding_window": 4096},
    "reformer": {**DECODER, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "xmod": {**DECODER, "default_language": "en_XX"},
    **dict.fromkeys(["bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"], DECODER),
    **dict.fromkeys(["megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"], DECODER),
    **dict.fromkeys(["roformer", "xlm-roberta", "xlm-roberta-xl"], DECODER),
}


def architecture(name: str, **config: Any) -> Any:
    """A random float32 model of the model type `name` with spread-out logits: a layer of each kind, small windows."""
    shape = small(AutoConfig.for_model(name, **{**MADE_SO.get(name, {}), **config}))
    kind: Any = AutoModelForSeq2SeqLM if shape.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind.from_config(shape).parameters())
    if size > LARGEST:
        raise ValueError(f"a small {name} would have {size:,} parameters")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind.from_config(shape, dtype=torch.float32).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=END, pad_token_id=END, decoder_start_token_id=0 if shape.is_encoder_decoder else None
    )
    return model.requires_grad_(False)


def save(model: Any, folder: Path) -> Path:
    """`model` in a folder, with a tokenizer."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    """The model in a folder as a user's `--target` is loaded. UserError if it is refused."""
    return load_pair(
        PairSpec(name="tried", target=ModelSpec(path=str(folder)), drafter="none"), LoadOptions(device="cpu")
    ).target.model


def generated(model: Any, prompt: list[int], length: int = LENGTH) -> list[int]:
    """The ids that transformers' `generate` says greedily, up to the end token."""
    ids = torch.tensor([prompt])
    limits = [module.time_step_limit[0] for module in model.modules() if hasattr(module, "time_step_limit")]
    given: dict[str, Any] = (
        {"use_cache": False} if any(limits) else {}
    )  # with a cache transformers forgets these limits
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **given)
    return list(out[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist())


PROMPTS: Rows = [[20, 31, 44, 20, 31, 44, 20, 31], [50, 51, 52, 53, 50, 51, 52, 53, 50, 51, 60, 61, 50, 51]]


def differing(model: Any, reference: Any, ways: Sequence[str] = ("alone", "ngram", "model", "tree")) -> list[str]:
    """The ways of drafting for `model` whose greedy text is not that of `generate`, in rows alone and together.

    UserError if the model is refused. Rows that cannot be decoded together (one line says so) are left out.
    """
    target, wanted = lm_of(model), [generated(reference, prompt) for prompt in PROMPTS]
    drafters: dict[str, Callable[[], Drafter]] = {
        "alone": NoDrafter,
        "ngram": lambda: NgramDrafter(target.vocab_size, stop_if_unknown=False),
        "model": lambda: ModelDrafter(lm_of(noisy_copy(reference, 0.03), "drafter")),
        "tree": lambda: Proposer([ModelSource(lm_of(noisy_copy(reference, 0.03), "drafter"))], tree=True, nodes=9),
    }
    wrong = []
    for way in ways:
        drafter = drafters[way]()
        for rows in ([0], [1, 1], [0, 1]):
            prompts = [PROMPTS[row] for row in rows]
            try:
                said = answers(target, prompts, drafter, greedy(), length=LENGTH, gamma=5, stop=[END])
            except UserError:
                if len(rows) == 1:
                    raise
                continue
            if said != [wanted[row] for row in rows]:
                wrong.append(f"{way}, rows {rows}")
    return wrong


def outcome(folder: Path, reference: Any) -> list[str] | str:
    """The ways of drafting that differ for the model in `folder`, or that it is refused in one line."""
    try:
        return differing(loaded(folder), reference)
    except UserError as error:
        return "refused in one line" if "\n" not in str(error) else str(error)
