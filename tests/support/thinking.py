"""A model that thinks and then answers, the same every time: each of its tokens has one that follows it."""

from itertools import pairwise
from pathlib import Path

import torch

from tests.support.tiny import END, TinyPair, tiny_model, tiny_tokenizer

WORDS = ["<think>", " so", " many", " stones", " lie", " here", "</think>", "\n\n", "Seven", " of them", "."]
TEXT = "".join(WORDS)
# As Qwen 3: of earlier answers what follows the thinking. As DeepSeek R1: the prompt begins it.
STRIPS = (
    "{% for m in messages %}{% set content = m.content %}{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>{{ m.role }}\n{{ content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BEGINS = STRIPS.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
# As gpt-oss: channels by the tokenizer's schema.
OPEN, FINAL = ["<|channel|>", "analysis", "<|message|>"], ["<|start|>", "final", "<|content|>"]
SCHEMA = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        "thinking": {"open": "".join(OPEN), "close": "<|close|>", "content": "text"},
        "content": {"open": "".join(FINAL), "close": END, "content": "text"},
    },
}


def thinking_pair(folder: Path, begins: bool = False, channels: bool = False) -> TinyPair:
    """The model in a folder, as target and as drafter. With `begins` its prompts begin the thinking; with `channels` it
    thinks in a channel."""
    tokenizer, words = tiny_tokenizer(), WORDS[begins:]
    tokenizer.chat_template = BEGINS if begins else STRIPS
    if channels:
        words = [*OPEN, *WORDS[1:6], "<|close|>", *FINAL, *WORDS[8:]]
        tokenizer.response_template = SCHEMA
    tokenizer.add_tokens([word for word in dict.fromkeys([*WORDS, *words]) if len(word) > 1])
    said = ["\n", *words]  # behind the end of a prompt
    chain = [*(tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in said), 2]
    assert tokenizer.decode(chain) == "".join(said) + END
    model = tiny_model(hidden=64, vocab_size=len(tokenizer))
    with torch.no_grad():
        for layer in model.model.layers:  # nothing is added to what a token is embedded as
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for token, following in pairwise(chain):
            model.lm_head.weight[following] = 4 * model.model.embed_tokens.weight[token]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TinyPair(folder, folder)
