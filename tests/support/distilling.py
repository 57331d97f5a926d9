"""A toy target that can be learned from: a small Llama that counts in words, trained in a few seconds.

The user names a number, the answer counts on from there. Byte-level, so most tokens follow from the few before.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny import VOCAB, tiny_tokenizer

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
FOLLOWING = 6  # numbers an answer counts on


def chats() -> list[str]:
    """Every chat that the target knows, in its template."""
    tokenizer = tiny_tokenizer()
    found = []
    for start, word in enumerate(NUMBERS):
        answer = " ".join((NUMBERS * 2)[start + 1 : start + 1 + FOLLOWING])
        messages = [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]
        found.append(str(tokenizer.apply_chat_template(messages, tokenize=False)).rstrip("\n"))
    return found


def counting_target(folder: Path, steps: int = 220) -> Path:
    """Train the target and save it with its tokenizer; the same one every time."""
    tokenizer = tiny_tokenizer()
    rows = [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats()]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    wanted = ids.masked_fill(ids == 0, -100)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(_shape(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
        for _ in range(steps):
            loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return _saved(model, folder)


def deepened(target: Path, folder: Path, layers: int = 7) -> Path:
    """Save the target with further layers, whose random weights are so small that they change little."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForCausalLM(_shape(layers))
    model.load_state_dict(LlamaForCausalLM.from_pretrained(target).state_dict(), strict=False)
    return _saved(model, folder)


def _saved(model: LlamaForCausalLM, folder: Path) -> Path:
    model.generation_config.eos_token_id = 2
    model.eval().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _shape(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
