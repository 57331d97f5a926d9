"""Small real models for fast tests: random Llama models and a byte-level tokenizer, saved in folders.

The drafter is the target with noise on its weights, so it agrees often but not always. Weights are
scaled up so that the two best logits lie far apart: greedy texts do not hang on rounding. The models
know no language; their texts are noise and that is all these tests need.
"""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app.settings.table import ModelOptions

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
WORDS = [" the", " and", " is", "ing", "tion", " of", " to", " in", "er ", "ed "]
VOCAB = 300
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyPair:
    """Two model folders, each with its tokenizer."""

    target: Path
    drafter: Path

    def flags(self) -> list[str]:
        """Command-line flags that choose this pair."""
        return ["--target", str(self.target), "--drafter", str(self.drafter), "--device", "cpu"]

    def options(self, drafter: str | None = None, **more: Any) -> ModelOptions:
        """The options that choose this pair, or its target with another drafter."""
        return ModelOptions(target=str(self.target), drafter=drafter or str(self.drafter), device="cpu", **more)


def tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer of exactly VOCAB ids: END is the stop token; any text survives a round trip."""
    vocabulary = {
        token: index for index, token in enumerate([PAD, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=PAD)
    tokenizer.add_special_tokens({"additional_special_tokens": [START]})
    tokenizer.add_tokens(WORDS + [f"<extra_{index}>" for index in range(VOCAB - len(tokenizer) - len(WORDS))])
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    seed: int = 0, *, layers: int = 2, hidden: int = 32, context: int = 512, **config: Any
) -> LlamaForCausalLM:
    """A random Llama in float32 with well separated logits; its own seed, the global one is untouched."""
    usual = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    shape = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        max_position_embeddings=context,
        pad_token_id=0,
        tie_word_embeddings=False,
        **{**usual, **config},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(shape).float().eval()
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 1.0 if "embed" in name else (3.0 if "lm_head" in name else 2.0)
                weight.data.normal_(0.0, scale / weight.shape[1] ** 0.5)
    return model


def noisy_copy(model: Any, noise: float, seed: int = 1) -> Any:
    """The model with Gaussian noise of `noise` × each weight matrix's own spread: it agrees often, not always."""
    twin = copy.deepcopy(model).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for weight in twin.parameters():
        if weight.dim() == 2:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return twin


def tiny_pair(
    folder: Path, *, noise: float = 0.02, seed: int = 0, chat: bool = True, stop: bool = True, **shape: Any
) -> TinyPair:
    """Save a target and a noisy copy of it under `folder`; `stop=False` makes the stop token unreachable."""
    target = tiny_model(seed, **shape)
    if not stop:
        target.lm_head.weight.data[2] = 0.0
    pair = TinyPair(folder / "target", folder / "drafter")
    for model, path in ((target, pair.target), (noisy_copy(target, noise), pair.drafter)):
        model.generation_config.eos_token_id = 2
        model.save_pretrained(path)
        tiny_tokenizer(chat=chat).save_pretrained(path)
    return pair


def write_prompts(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A jsonl file of prompts."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
