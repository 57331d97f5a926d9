"""A GGUF file's tokenizer has llama.cpp's ids, ends and beginnings.

The ids are those of llama-cpp-python 0.3.36, which the exhaustive test asks itself where it is installed.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import pytest
from tokenizers import pre_tokenizers
from transformers import LlamaTokenizer

from app.chat.conversation import Conversation
from tests.support.quantized import closed
from tests.support.refusals import refused
from utils.catalogue.templates import end_ids as template_ends
from utils.gguf.header import read_header
from utils.gguf.vocabulary import end_ids, tokenizer_of
from utils.loading.build import load_tokenizer
from utils.loading.loaded import LoadOptions
from utils.tokenizer import first_ids

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    "▁",
    "a",
    "b",
    "ab",
    "▁a",
    "▁ab",
    "[",
    "▁[",
    "INST",
    "I",
    "N",
    "S",
    "T",
    "IN",
    "ST",
    "]",
    "▁▁",
    "▁b",
    "<",
    "▁<",
]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
ROLES = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
BEGUN = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}


class File(NamedTuple):
    """A vocabulary: tokens before the bytes with their types (None: the file has none), keys under tokenizer.ggml."""

    architecture: str
    tokens: dict[str, int]
    keys: Mapping[str, Any] = MappingProxyType({})
    pre: str | None = None  # byte-level, split so
    typed: bool = True
    name: str = "model"
    template: str | None = None

    @property
    def listed(self) -> list[str]:
        return [*self.tokens, *([*LETTERS, "ab", "Ġa"] if self.pre else BYTES + PIECES)]

    def write(self, path: Path) -> Path:
        writer, tokens = gguf.GGUFWriter(str(path), self.architecture), self.listed
        sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64}
        for key, size in {**sizes, "attention.head_count": 1, "vocab_size": len(tokens)}.items():
            writer.add_uint32(f"{self.architecture}.{key}", size)
        writer.add_float32(f"{self.architecture}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_string("general.name", self.name)
        writer.add_tokenizer_model("gpt2" if self.pre else "llama")
        writer.add_token_list(tokens)
        if self.typed:
            rest = [BYTE if token in BYTES else NORMAL for token in tokens[len(self.tokens) :]]
            writer.add_token_types([*self.tokens.values(), *rest])
        if self.pre:
            writer.add_tokenizer_pre(self.pre)
            writer.add_token_merges(["a b", "Ġ a"])
        else:
            writer.add_token_scores([-float(index) for index in range(len(tokens))])
        for key, value in {**ROLES, **self.keys}.items():
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
            if value is not None:
                add(f"tokenizer.ggml.{key}", value)
        if self.template is not None:
            writer.add_chat_template(self.template)
        return closed(writer, path)

    def load(self, folder: Path) -> Any:
        """The tokenizer of the file, after its way through a converted folder."""
        file = self.write(folder / "model.gguf")
        tokenizer_of(file, read_header(file), 64).save_pretrained(str(folder / "out"))
        family = {"gemma3": "gemma3_text"}.get(self.architecture, self.architecture)
        (folder / "out" / "config.json").write_text(json.dumps({"model_type": family}))
        return load_tokenizer(folder / "out", LoadOptions())


def spelled(tokenizer: Any, text: str) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"]))


TURNS = {"<|user|>": CONTROL, "<|end|>": CONTROL, "<|assistant|>": CONTROL, "<|endoftext|>": CONTROL}
GEMMA = {"<unk>": UNKNOWN, "<bos>": CONTROL, "<eos>": CONTROL, "<start_of_turn>": CONTROL, "\n": USER, "  ": USER}
QWEN = {"<unk>": NORMAL, "<s>": CONTROL, "</s>": CONTROL, "<｜User｜>": CONTROL, "  ": USER, "<|im_end|>": NORMAL}
FILES = {
    "llama 2": File("llama", BEGUN),
    "said": File("llama", BEGUN, {"add_space_prefix": True}),
    "no prefix": File("llama", BEGUN, {"add_space_prefix": False}),
    "phi-3": File("phi3", BEGUN | TURNS, name="Phi-3 mini"),
    "phi-4": File("phi3", BEGUN | TURNS),
    "gemma 2": File("gemma2", GEMMA, {"add_space_prefix": False}),
    "gemma 3": File("gemma3", GEMMA),
    "qwen": File("qwen2", QWEN, pre="qwen2"),
}
EXPECTED = {
    ("llama 2", ""): "",
    ("llama 2", "a"): "▁a",
    ("llama 2", " a"): "▁,▁a",
    ("llama 2", "<s>[INST] ab [/INST]"): "<s>,▁[,INST,],▁ab,▁[,<0x2F>,INST,]",
    ("llama 2", "<s>[INST] a [/INST] b</s>\n<s>"): "<s>,▁[,INST,],▁a,▁[,<0x2F>,INST,],▁b,</s>,▁,<0x0A>,<s>",
    ("llama 2", "</s>\na"): "</s>,▁,<0x0A>,a",
    ("llama 2", "<unk>  a"): "<unk>,▁▁,▁a",
    ("said", "<s>[INST]"): "<s>,▁[,INST,]",
    ("no prefix", "<s>[INST] a</s>\na"): "<s>,[,INST,],▁a,</s>,<0x0A>,a",
    ("no prefix", " a"): "▁a",
    ("phi-3", "<|user|>\na<|end|>\n<|assistant|>\n"): "<|user|>,▁a,<|end|>,<|assistant|>",
    ("phi-3", "<s>\na<|endoftext|>\na"): "<s>,▁,<0x0A>,a,<|endoftext|>,▁,<0x0A>,a",
    ("phi-4", "<|user|>\na<|end|>\n"): "<|user|>,▁,<0x0A>,a,<|end|>,▁,<0x0A>",
    ("gemma 2", "<bos><start_of_turn>a\n  b   b"): "<bos>,<start_of_turn>,a,\n,  ,b,  ,▁b",
    ("gemma 2", " a"): "▁a",
    ("gemma 3", "<bos><start_of_turn>a\n"): "<bos>,<start_of_turn>,▁a,\n",
    ("gemma 3", "  a"): "  ,▁a",
    ("qwen", "<｜User｜>a ab<|im_end|>"): "<｜User｜>,a,Ġ,ab,<|im_end|>",
    ("qwen", "a   b"): "a,  ,Ġ,b",
}


@pytest.mark.parametrize(("name", "text"), EXPECTED)
def test_ids_are_llama_cpps(name: str, text: str, tmp_path: Path) -> None:
    assert ",".join(spelled(FILES[name].load(tmp_path), text)) == EXPECTED[name, text]


# -- ends of answers -------------------------------------------------------------------------------------

OTHERS = ("<custom>", "<other>")
HARMONY = ("<|return|>", "<|call|>", "<|end|>")


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        ({"<|im_end|>": USER}, {}, {"</s>", "<|im_end|>"}),
        ({"<|im_end|>": NORMAL}, {}, {"</s>", "<|im_end|>"}),
        ({"<turn|>": UNUSED, "<|endoftext|>": USER}, {}, {"</s>", "<turn|>", "<|endoftext|>"}),
        ({"<turn|>": USER, "<|tool_response>": USER}, {}, {"<turn|>", "<|tool_response>"}),
        (dict.fromkeys(HARMONY, CONTROL), {}, {"</s>", "<|return|>", "<|call|>"}),
        (dict.fromkeys(HARMONY[1:], CONTROL), {}, {"</s>", "<|call|>", "<|end|>"}),
        ({"<custom>": CONTROL}, {}, {"</s>"}),
        (dict.fromkeys(OTHERS, NORMAL), {"eot_token_id": 3, "eom_token_id": 4}, {"</s>", *OTHERS}),
        ({"<custom>": CONTROL}, {"eos_token_id": None}, {"</s>"}),
    ],
)
def test_names_end_an_answer_whatever_their_type(
    tokens: dict[str, int], keys: dict[str, Any], ends: set[str], typed: bool, tmp_path: Path
) -> None:
    file = File("llama", {**BEGUN, **tokens}, keys, typed=typed)
    tokenizer = file.load(tmp_path)
    assert {file.listed[end] for end in end_ids(read_header(tmp_path / "model.gguf"))} == ends
    for end in ends - {*OTHERS}:  # one token of a chat, and none of the answer's text
        ids = tokenizer(f"a{end}", add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == ["▁a", end]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_a_name_that_a_template_mentions_is_no_end(tmp_path: Path) -> None:
    template = "{{ messages[0].content | replace('<|im_end|>', '') | replace('<custom>', '') }}"
    tokenizer = File("llama", {**BEGUN, "<custom>": CONTROL}, template=template).load(tmp_path)
    assert end_ids(read_header(tmp_path / "model.gguf")) == [2]
    assert template_ends(tokenizer) == frozenset()


def test_too_few_types_are_one_line(tmp_path: Path) -> None:
    file = File("llama", BEGUN).write(tmp_path / "model.gguf")
    header = read_header(file)
    header = header._replace(metadata={**header.metadata, "tokenizer.ggml.token_type": [1, 2]})
    refused(tokenizer_of, file, header, 64, match="has 279 tokens, and 2 in tokenizer.ggml.token_type")


# -- beginnings ------------------------------------------------------------------------------------------

WRITES = {"with": "{{ bos_token }}{{ messages[0].content }}", "without": "{{ messages[0].content }}", "none": None}


@pytest.mark.parametrize("named", ["auto", "chatml", "mistral"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("template", WRITES)
def test_the_file_says_whether_a_text_begins_with_the_bos(
    template: str, flag: bool | None, kind: str, named: str, tmp_path: Path
) -> None:
    pre = None if kind == "llama" else kind
    architecture = "qwen2" if kind == "qwen2" else "llama"
    tokenizer = File(architecture, BEGUN, {"add_bos_token": flag}, pre, template=WRITES[template]).load(tmp_path)
    begins = kind != "qwen2" if flag is None else flag
    chat = Conversation(tokenizer, frozenset(), 999, template=named)
    writes = named == "mistral" or (named == "auto" and template == "with")
    assert chat.plan("a").prompt.count(1) == int(begins or writes)
    assert not begins or chat.plan("a").prompt[0] == 1
    plain = Conversation(tokenizer, frozenset(), 999, chat=False)
    assert [plain.plan(text).prompt.count(1) for text in ("a", "<s>a")] == [int(begins), 1]
    assert first_ids(tokenizer, "<s>a").count(1) == 1


# -- borders inside a chat -------------------------------------------------------------------------------

LINES = (
    "{% for m in messages %}{{ ('user\n' if m.role == 'user' else '') + m.content }}"
    "{{ (eos_token if m.role == 'assistant' else '') + '\n' }}{% endfor %}"
)


@pytest.mark.parametrize("end", [(2,), ()])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("legacy", [True, False, None])
def test_a_later_prompt_has_the_ids_of_its_text(
    legacy: bool | None, chat: bool, end: tuple[int, ...], tmp_path: Path
) -> None:
    """With transformers' own tokenizer of a folder, and with a file's."""
    tokenizer = File("llama", BEGUN).load(tmp_path)
    if legacy is not None:
        stored = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]
        tokenizer = LlamaTokenizer(
            vocab=stored["vocab"], merges=[tuple(pair) for pair in stored["merges"]], legacy=legacy
        )
    tokenizer.chat_template = LINES
    talk = Conversation(tokenizer, frozenset([2]), 999, chat=chat)
    plan, answer = talk.plan("a"), tokenizer("ab", add_special_tokens=False)["input_ids"]
    talk.commit(plan, [*answer, *end], "eos" if end else "length")
    text = "user\na\n ab</s>\nuser\n b\n" if chat else "a ab\n b"
    expected = tokenizer("<s>" * (legacy is None) + text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(talk.plan(" b").prompt) == tokenizer.convert_ids_to_tokens(expected)


# -- llama.cpp itself ------------------------------------------------------------------------------------


def of_llama_cpp(file: Path, texts: list[str]) -> tuple[list[list[int]], list[int], bool]:
    """llama.cpp's ids of the texts with its beginning, its ends, and whether it has a beginning."""
    cpp: Any = pytest.importorskip("llama_cpp")
    silence = cpp.llama_log_callback(lambda *_: None)
    cpp.llama_log_set(silence, None)
    settings = cpp.llama_model_default_params()
    settings.vocab_only = True
    model = cpp.llama_model_load_from_file(str(file).encode(), settings)
    assert model
    vocabulary, rows = cpp.llama_model_get_vocab(model), []
    for text in map(str.encode, texts):
        ids = (cpp.llama_token * 999)()
        rows.append(list(ids[: cpp.llama_tokenize(vocabulary, text, len(text), ids, len(ids), True, True)]))
    ends = [token for token in range(cpp.llama_vocab_n_tokens(vocabulary)) if cpp.llama_vocab_is_eog(vocabulary, token)]
    begins = cpp.llama_vocab_get_add_bos(vocabulary)
    cpp.llama_model_free(model)
    cpp.llama_log_set(cpp.llama_log_callback(), None)
    return rows, ends, begins


GAPS = ("<|fim_pad|>", "<|repo_name|>")  # which are none of an answer
NAMES = ["<|im_end|>", "<|user|>", "<|end|>", "<turn|>", "<|return|>", "<|call|>", "<|channel|>", "<|tool_response>"]
NAMES += [
    "<eos>",
    "<custom>",
    "  ",
    "   ",
    "<｜User｜>",
    "▁<PRE>",
    "[INST]",
    "<|flush|>",
    "<|fim_pad|>",
    "<|repo_name|>",
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(200))
def test_any_types_and_flags_give_llama_cpps_ids(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    tokens = {**BEGUN, "<|endoftext|>": draw.choice([CONTROL, USER])}
    tokens |= {name: draw.choice([NORMAL, CONTROL, USER, UNUSED]) for name in draw.sample(NAMES, 8)}
    pre = draw.choice([None, None, "gpt-2", "llama-bpe", "qwen2", "smollm"])
    architecture = draw.choice(["llama", "qwen2"] if pre else ["llama", "phi3", "gemma2", "gemma3"])
    keys = {flag: draw.choice([True, False, None]) for flag in ("add_bos_token", "add_space_prefix")}
    keys["eos_token_id"] = 3 if "<|tool_response>" in tokens else draw.choice([2, 3])
    blank = any(not token.strip() for token in tokens)  # which a stripping neighbour would take in another order
    name = "model" if blank else draw.choice(["model", "Phi-3 mini"])
    file = File(architecture, tokens, keys, pre, name=name)
    words = [*tokens, "a", "ab", " ", "  ", "\n", "é", "[INST] ", "Hi"]
    texts = ["".join(draw.choices(words, k=draw.randrange(9))) for _ in range(30)]
    tokenizer = file.load(tmp_path)
    rows, ends, begins = of_llama_cpp(tmp_path / "model.gguf", texts)
    assert end_ids(read_header(tmp_path / "model.gguf")) == [end for end in ends if file.listed[end] not in GAPS]
    for text, ids in zip(texts, rows, strict=True):
        found = tokenizer(text)["input_ids"]
        assert (text, tokenizer.convert_ids_to_tokens(found)) == (text, [file.listed[token] for token in ids])
    assert tokenizer.init_kwargs.get("bos_before_chat", False) == begins
