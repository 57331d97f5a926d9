"""A GGUF file's vocabulary → its tokenizer and the ends of answers, by llama.cpp's rules (llama-vocab.cpp).

Each token has its own type: control, user-defined and unknown tokens are matched, as the file spells them, before a
text is split. In a sentencepiece vocabulary every stretch of text between them begins with a space, unless
`add_space_prefix` is false. Knows no weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.errors import UserError, holding
from utils.gguf.header import TOKENS, GgufHeader
from utils.objects import HfTokenizer, Json
from utils.tokenizer import BOS_BEFORE_CHAT

_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4  # among tokenizer.ggml.token_type
_LLAMA = {"bos": 1, "eos": 2, "unknown": 0}  # ids of a sentencepiece vocabulary that names none

# Tokens that end an answer wherever a vocabulary has them. These, and those of the next set, count as control tokens
# whatever type the file gives them.
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<turn|>", "<|tool_response>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
}
_FILL_IN_THE_MIDDLE = {  # marks of texts with a gap: llama.cpp ends an answer at some, which no chat does
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
    *("<|prefix|>", "<|suffix|>", "<|middle|>"),
}
_VISIBLE_CONTROLS = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}  # user-defined: a text shows them

# Vocabularies that split off every digit before anything else; transformers leaves this out for GGUF files.
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}

# Those that split as GPT-2's does, by llama.cpp's list; None: files from before the key.
_AS_GPT2 = {
    *(None, "default", "gpt-2", "phi-2", "jina-es", "jina-de", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo"),
    *("jais", "trillion", "granite-docling"),
}

# Those in which a word that is a token is that token, without merges, and texts begin with the BOS.
_IGNORE_MERGES = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"),
    "jina-v5-nano",
}


def _tokenizer(header: GgufHeader, key: str, default: object = None) -> Any:
    return header.metadata.get(f"tokenizer.ggml.{key}", default)


def _role(header: GgufHeader, role: str) -> int | None:
    default = _LLAMA.get(role) if _tokenizer(header, "model") == "llama" else None
    return header.metadata.get(f"tokenizer.ggml.{role}_token_id", default)


def _typed(header: GgufHeader) -> tuple[list[str], list[int], set[int]]:
    """Return the tokens, their types and the ids that end an answer. UserError unless each token has a type."""
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(header.metadata.get(TOKENS, ()))]
    types = list(_tokenizer(header, "token_type", [_NORMAL] * len(tokens)))
    if len(types) < len(tokens):
        raise UserError(
            f"{header.parts[0].name} has {len(tokens)} tokens, and {len(types)} in tokenizer.ggml.token_type"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    for token in (_ENDS | _FILL_IN_THE_MIDDLE) & ids.keys():
        types[ids[token]] = _CONTROL
    roles = (_role(header, role) for role in ("eos", "eot", "eom"))
    ends = {ids[token] for token in _ENDS & ids.keys()} | {token for token in roles if token is not None}
    names = {tokens[end] for end in ends if end < len(tokens)}
    several = names & {"<|return|>", "<|flush|>"} and names & {"<|call|>", "<|calls|>"}
    inside = holding({"<|end|>": several, "</s>": names & {"<|tool_response>", "<|plamo:eos|>"}})
    for token in names.intersection(inside):  # <|end|> ends a message, of which an answer has several
        ends.discard(ids[token])
        types[ids[token]] = _USER if token == "<|end|>" else _NORMAL
    for token in _VISIBLE_CONTROLS & ids.keys():
        types[ids[token]] = _USER
    return tokens, types, ends


def end_ids(header: GgufHeader) -> list[int]:
    """Return the ids that end an answer: those that the file names, and known names whatever their type."""
    return sorted(_typed(header)[2])


def tokenizer_of(file: Path, header: GgufHeader, context: int) -> HfTokenizer:
    """Return the tokenizer of a GGUF file for a model with `context` positions: transformers' class, with llama.cpp's
    ids. UserError, in one line, for a way to split text that this program does not know."""
    import transformers
    from tokenizers import AddedToken, Tokenizer

    tokens, types, _ = _typed(header)
    if (kind := _tokenizer(header, "model")) not in ("llama", "gpt2"):
        return transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    ids = {token: index for index, token in enumerate(tokens)}
    roles = {
        f"{role[:3]}_token": tokens[token]
        for role in ("bos", "eos", "unknown", "padding")
        if (token := _role(header, role)) is not None
    }
    backend: Tokenizer = (
        _sentencepiece_tokenizer(header, ids, roles) if kind == "llama" else _byte_level_tokenizer(file, header, ids)
    )
    name = str(header.metadata.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name  # their special tokens take the white space after them
    backend.add_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=type_ != _USER,
                rstrip=strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for token, type_ in zip(tokens, types, strict=False)
            if type_ in (_UNKNOWN, _CONTROL, _USER)
        ]
    )
    begins = _tokenizer(header, "add_bos_token", kind == "llama" or _tokenizer(header, "pre") in _IGNORE_MERGES)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=header.metadata.get("tokenizer.chat_template"),
        add_bos_token=begins,
        add_eos_token=_tokenizer(header, "add_eos_token", False),
        model_max_length=context,
        **roles,
    )
    for key in ("add_bos_token", "add_eos_token"):  # tokenizer.json has both
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.init_kwargs[BOS_BEFORE_CHAT] = begins and "bos_token" in roles
    return tokenizer


def _sentencepiece_tokenizer(header: GgufHeader, ids: Mapping[str, int], roles: Mapping[str, str]) -> HfTokenizer:
    """Return the tokenizer of a sentencepiece vocabulary, which joins the pair of the best score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    scores = dict(zip(ids, _tokenizer(header, "scores", [0.0] * len(ids)), strict=False))
    rules: Json = {"unk_token": roles.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(vocab=dict(ids), merges=generate_merges(dict(ids), scores), **rules))
    prefix = _tokenizer(header, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    texts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*texts, decoders.Strip(" ", 1, 0)] if prefix else texts)
    return backend


def _byte_level_tokenizer(file: Path, header: GgufHeader, ids: Mapping[str, int]) -> HfTokenizer:
    """Return the tokenizer of a byte-level vocabulary: transformers' merges and split, the tokens as they are."""
    import transformers
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if (split := _tokenizer(header, "pre")) not in _AS_GPT2 | _DIGITS_APART | GGUF_PRE_TOKENIZER_SPLITS.keys():
        raise UserError(f"tokenizer.ggml.pre is '{split}', a way to split text that this program does not know")
    theirs: HfTokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    state = json.loads(theirs.backend_tokenizer.to_str())
    state["model"] |= {
        "vocab": dict(ids),
        "merges": [pair for pair in state["model"]["merges"] if ids.keys() >= {*pair, "".join(pair)}],
        "ignore_merges": split in _IGNORE_MERGES,
    }
    backend = Tokenizer.from_str(json.dumps(state | {"added_tokens": [], "post_processor": None}))
    if split in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return backend
