"""A T5 pair that has learned something real in seconds: spelling out numbers ("412" → "four hundred twelve").

The tokenizer knows digits and number words. Target and drafter are trained here, on one thread, with their own seeds;
the drafter is smaller and stops earlier, so it agrees often but not always.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

PAD, END = 0, 1
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
TOKENS = ["<pad>", "</s>", "<unk>", *"0123456789", *ONES, *TENS, "hundred"]
VOCAB = len(TOKENS)


def spelled(number: int) -> list[str]:
    """The words of a number below 1000."""
    if number < 20:
        return [ONES[number]]
    if number < 100:
        return [TENS[number // 10 - 2], *([ONES[number % 10]] if number % 10 else [])]
    return [ONES[number // 100], "hundred", *(spelled(number % 100) if number % 100 else [])]


def question(number: int) -> list[int]:
    """The encoder's ids: digits, then the end."""
    return [*map(TOKENS.index, str(number)), END]


def solution(number: int) -> list[int]:
    """The right answer's ids, the end included."""
    return [*map(TOKENS.index, spelled(number)), END]


def number_tokenizer() -> PreTrainedTokenizerFast:
    """Digits one by one, words whole; the end is put behind every prompt, as T5's does."""
    inner = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def number_model(seed: int, width: int, layers: int, **more: Any) -> T5ForConditionalGeneration:
    """An untrained T5; its own seed, the global one is untouched."""
    shape = {"d_kv": 8, "d_ff": 2 * width, "num_heads": width // 8, "dropout_rate": 0.0} | more
    config = T5Config(
        vocab_size=VOCAB,
        d_model=width,
        num_layers=layers,
        num_decoder_layers=layers,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=END,
        **shape,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(config).float()


def train(model: T5ForConditionalGeneration, steps: int, seed: int, rate: float, rows: int = 64) -> Any:
    """Teacher forcing on random numbers; the trained model, ready to decode."""
    chance, made = random.Random(seed), torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    plan = torch.optim.lr_scheduler.OneCycleLR(made, rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        numbers = [chance.randrange(1000) for _ in range(rows)]
        asked = padded(list(map(question, numbers)), PAD)
        wanted = padded(list(map(solution, numbers)), -100)
        made.zero_grad()
        model(input_ids=asked, attention_mask=(asked != PAD).long(), labels=wanted).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        plan.step()
    return model.eval().requires_grad_(False)


def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


@dataclass(frozen=True)
class NumberPair:
    """Two trained models, and the folders that hold them with their tokenizer."""

    target: Any
    drafter: Any
    folder: Path

    @property
    def catalogue(self) -> Path:
        """A models.yaml with the pairs `numbers` (a drafter model) and `cascaded`, which are what it says."""
        return self.folder / "models.yaml"


def number_pair(folder: Path) -> NumberPair:
    """Train both, save both."""
    target = train(number_model(0, 48, 1), 300, seed=1, rate=7e-3)
    drafter = train(number_model(2, 32, 1), 120, seed=3, rate=1e-2)
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(folder / name)
        number_tokenizer().save_pretrained(folder / name)
    (folder / "models.yaml").write_text(
        "default: numbers\npairs:\n"
        "  numbers: {target: ./target, drafter: ./drafter, arch: seq2seq}\n"
        "  cascaded: {target: ./target, cascade: [./drafter, maxgram], arch: seq2seq, method: cascade,\n"
        "             k_matrix: [[3, 4], [0, 3]], lenience: 2}\n"
    )
    return NumberPair(target, drafter, folder)
