"""Two tokenizers trained on different text: byte-level BPE, and unigram with `▁` and bytes."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

STORY = "the cat sat on the mat and the hat sat on the cat, that is that: the end of the tale of a cat in a hat. "
RECIPE = "take the salt and the oats, heat the oats in a pan; that is the meal at an inn, then eat. naïve café 12 24 "
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@cache
def byte_level(size: int = 300) -> PreTrainedTokenizerFast:
    """Of `size` ids, all bytes among them; id 0 ends a text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_end|>", "<|im_start|>"]
    train = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    inner.train_from_iterator([STORY] * 4, train)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=CHAT)


@cache
def unigram(size: int = 60, prefix: str = "always") -> PreTrainedTokenizerFast:
    """About `size` pieces and a token for every byte; texts begin with <s> and with a space."""
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    special = ["<unk>", "<s>", "</s>"]
    train = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator([RECIPE] * 4, train)
    pieces = [(token, inner.id_to_token(token)) for token in range(inner.get_vocab_size())]
    scored = [(piece, -float(token) / 10) for token, piece in pieces] + [(f"<0x{b:02X}>", -50.0) for b in range(256)]
    whole = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    whole.add_special_tokens(special)
    whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
