"""A plain draft head as an ordinary transformers model, in memory or as a folder that any other program can load.

Its layers are Llama's, one to one; the square matrix before the head is multiplied into the head's rows. A head over
a reduced vocabulary has no place in an ordinary configuration and is refused. Knows neither training nor sessions.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sampling.drafters.draft_heads.checkpoint import is_draft_head
from sampling.drafters.draft_heads.modules import DraftHead
from utils.errors import UserError
from utils.files import WriteError, replacing

_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
)
_EMBEDDING, _HEAD, _PROJECT = "model.embed_tokens.weight", "lm_head.weight", "model.project.weight"


def llama_of(draft_head: DraftHead) -> LlamaForCausalLM:
    """The same network in transformers' own code, float32; tensors are shared with the draft head where they can be.

    Raises UserError for one that is not plain, or that covers a reduced vocabulary.
    """
    config = draft_head.config
    if config.kind != "plain":
        reads = {"glide": "keys and values"}.get(config.kind, "hidden states")
        raise UserError(f"a {config.kind} drafter reads its target's {reads}: only a plain one is a model of its own")
    if config.short_list:
        raise UserError(
            f"cannot export: the drafter's head covers {config.short_list:,} of {config.vocab_size:,} ids and no "
            "transformers configuration describes that (distil one with a head over all ids)"
        )
    tensors = {name: value.detach().float() for name, value in draft_head.state_dict().items()}
    if config.project:
        tensors[_HEAD] = tensors[_HEAD] @ tensors.pop(_PROJECT)
    tied = torch.equal(tensors[_HEAD], tensors[_EMBEDDING])
    same = {name: getattr(config, name) for name in _SAME}
    made = LlamaConfig(
        **same,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):  # no memory, and no noise of the global generator, for parameters that are replaced
        model: Any = LlamaForCausalLM(made)
    model.model.rotary_emb = LlamaRotaryEmbedding(made)
    if tied:
        del tensors[_HEAD]
    model.load_state_dict(tensors, strict=not tied, assign=True)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    found: LlamaForCausalLM = model.eval().requires_grad_(False)
    return found


def export_plain(draft_head: DraftHead, folder: str | Path, tokenizer: Any = None) -> int:
    """Write a draft head as an ordinary transformers folder (bfloat16 safetensors); the bytes of its weights.

    `tokenizer`, the target's, is saved beside it where given. Each file appears whole or not at all.

    Raises:
        UserError: one that is not plain, a head over a reduced vocabulary (no ordinary configuration has one), a folder
            that holds a draft head, or one that cannot be written; nothing is written then.
    """
    place = Path(folder)
    if is_draft_head(place):
        raise UserError(f"cannot export to {place}: it holds a student that would be overwritten (name another folder)")
    model: Any = llama_of(draft_head)
    model.to(torch.bfloat16).config.dtype = torch.bfloat16
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=place) as made:
            model.save_pretrained(made)
            if tokenizer is not None:
                tokenizer.save_pretrained(made)
            files = sorted(Path(made).iterdir(), key=lambda file: file.name == "config.json")  # which makes it a model
            size = sum(file.stat().st_size for file in files if file.suffix == ".safetensors")
            for file in files:
                with file.open("rb") as source, replacing(place / file.name) as out:
                    shutil.copyfileobj(source, out, 1 << 20)
    except WriteError:
        raise
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot export to {place}: {getattr(error, 'strerror', None) or error}") from None
    return size
