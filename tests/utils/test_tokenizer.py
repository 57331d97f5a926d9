"""A tokenizer read as one file is transformers' tokenizer of the same folder."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoTokenizer

from app.lanes.pairing import catalogue_in
from tests.support.refusals import refused
from utils.catalogue.templates import TEMPLATES, end_ids, render
from utils.loading.build import load_tokenizer
from utils.loading.fit import TokenBytes, fingerprint
from utils.loading.loaded import LoadOptions
from utils.loading.sources import model_folder
from utils.tokenizer import ROLES, FileTokenizer, file_tokenizer

TEXTS = ["", " ", "Name a colour.", "naïve 東京 🙂\u200d\n\t 1234567", "<|im_start|>user\nHi<|im_end|>", "a" * 300]
CHAT = [{"role": "user", "content": "Hi\n"}, {"role": "assistant", "content": "Ja?"}, {"role": "user", "content": "No"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder(catalogue_in(Path(__file__).parents[2] / "models.yaml").pair("smollm2").target, LoadOptions())


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


@pytest.fixture
def ours(folder: Path) -> FileTokenizer:
    """One that must not ask for transformers' own."""
    found = file_tokenizer(folder, lambda: pytest.fail("transformers' own is asked for"))
    assert found is not None
    return found


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_theirs(ours: FileTokenizer, theirs: Any, special: bool) -> None:
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=special)
        found = ours(text, add_special_tokens=special)
        assert found["input_ids"] == found.input_ids == expected["input_ids"]
        assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("skipped", [True, False])
def test_texts_are_theirs(ours: FileTokenizer, theirs: Any, skipped: bool) -> None:
    for ids in [theirs(text).input_ids for text in TEXTS] + [[1], [2, 5, 49151], list(range(40))]:
        how = {"skip_special_tokens": skipped, "clean_up_tokenization_spaces": False}
        assert ours.decode(ids, **how) == theirs.decode(ids, **how)
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(600) == theirs.decode(600)


def test_its_vocabulary_is_theirs(ours: FileTokenizer, theirs: Any) -> None:
    assert ours.get_vocab() == theirs.get_vocab()
    assert (len(ours), fingerprint(ours)) == (len(theirs), fingerprint(theirs))
    for role in ROLES:
        assert getattr(ours, role) == getattr(theirs, role)
        assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_id")
    assert end_ids(ours, "chatml") == end_ids(theirs, "chatml") != frozenset()
    mine, other = TokenBytes(ours), TokenBytes(theirs)
    assert (mine.by_bytes, mine.special, mine.begin) == (other.by_bytes, other.special, other.begin)


@pytest.mark.parametrize("name", ["auto", *TEMPLATES])
@pytest.mark.parametrize("chat", [CHAT, [{"role": "system", "content": "Be brief."}, *CHAT], CHAT[:1]])
def test_chats_are_theirs(ours: FileTokenizer, theirs: Any, name: str, chat: list[dict[str, str]]) -> None:
    assert render(ours, chat, name) == render(theirs, chat, name)


def test_what_it_cannot_do_itself_is_asked_of_theirs(folder: Path, theirs: Any) -> None:
    asked: list[int] = []

    def load() -> Any:
        asked.append(1)
        return theirs

    found = file_tokenizer(folder, load)
    assert found is not None
    assert not asked
    assert found(["a", "b c"])["input_ids"] == theirs(["a", "b c"])["input_ids"]
    assert (
        found.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        == theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    )
    stating = "{{ raise_exception('no') if messages | length > 9 else messages | tojson }}"
    told = found.apply_chat_template(CHAT, tokenize=False, chat_template=stating)
    assert told == theirs.apply_chat_template(CHAT, tokenize=False, chat_template=stating)
    spaced = torch.tensor(theirs("He said , no .").input_ids)
    for cleaned in (None, False, True):
        how = {"clean_up_tokenization_spaces": cleaned}
        assert found.decode(spaced, **how) == theirs.decode(spaced, **how)
    assert found.padding_side == theirs.padding_side
    assert len(asked) == 1
    with pytest.raises(AttributeError):
        _ = found.no_such_thing


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"bos_token": {"content": "<|im_start|>", "lstrip": True}}),
        ("tokenizer_config.json", {"bos_token": "never seen"}),
        ("config.json", {"model_type": "qwen2"}),
        (
            "tokenizer.json",
            {"truncation": {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}},
        ),
    ],
)
def test_another_folder_is_left_to_transformers(
    folder: Path, tmp_path: Path, file: str, changes: dict[str, Any]
) -> None:
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    assert file_tokenizer(tmp_path, dict) is not None
    (tmp_path / file).write_text(
        json.dumps(json.loads((tmp_path / file).read_text(encoding="utf-8")) | changes), encoding="utf-8"
    )
    assert file_tokenizer(tmp_path, dict) is None


def test_the_loader_takes_the_one_or_the_other(folder: Path, tmp_path: Path, theirs: Any) -> None:
    assert isinstance(load_tokenizer(folder, LoadOptions()), FileTokenizer)
    theirs.save_pretrained(str(tmp_path))  # no model's configuration beside it
    assert isinstance(load_tokenizer(tmp_path, LoadOptions()), type(theirs))


# -- sentencepiece models ----------------------------------------------------------------------------

ALONE = {  # a model's type → its file, the kind of its pieces, and its special ids
    "mt5": ("spiece.model", "unigram", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}),
    "umt5": ("spiece.model", "unigram", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}),
    "llama": ("tokenizer.model", "bpe", {"unk_id": 0, "bos_id": 1, "eos_id": 2, "byte_fallback": True}),
    "mistral": ("tokenizer.model", "bpe", {"unk_id": 0, "bos_id": 1, "eos_id": 2, "byte_fallback": True}),
    "xlm-roberta": ("sentencepiece.bpe.model", "unigram", {}),
}


def with_pieces(folder: Path, model_type: str, file: str, kind: str, more: dict[str, Any]) -> SentencePieceProcessor:
    """The sentencepiece model, trained on the README, that lies alone in the folder of a model of this type."""
    lines = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").splitlines()
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *["Every answer, in 2 lanes!"] * 20]),
        model_writer=written,
        vocab_size=500,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        **more,
    )
    folder.mkdir()
    (folder / file).write_bytes(written.getvalue())
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize("model_type", ALONE)
def test_a_sentencepiece_model_alone_is_a_tokenizer(model_type: str, tmp_path: Path) -> None:
    pieces = with_pieces(tmp_path / "model", model_type, *ALONE[model_type])
    tokenizer = load_tokenizer(tmp_path / "model", LoadOptions())
    for text in ("The target checks the draft.", "Every answer, in 2 lanes!"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == pieces.encode_as_pieces(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "</s>"


def test_a_sentencepiece_model_that_transformers_reads_otherwise_is_refused(tmp_path: Path) -> None:
    with_pieces(tmp_path / "model", "xglm", *ALONE["xlm-roberta"])
    refused(
        load_tokenizer, tmp_path / "model", LoadOptions(), match=r"^cannot load the tokenizer in .*sentencepiece.*$"
    )
