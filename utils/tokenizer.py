"""A tokenizer that is one file, read without importing transformers.

It has the names, ids and texts of transformers' `TokenizersBackend` of the same folder, and loads that for everything
else. A folder with nothing but a sentencepiece model gets the transformers class that splits text as that model
does.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.objects import HfTokenizer, Json

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import AddedToken, Tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
# A key of the configuration of a GGUF file's tokenizer: whether a chat begins with the BOS, whatever its template.
BOS_BEFORE_CHAT = "bos_before_chat"
_WITHOUT_EFFECT = {"backend", "tokenizer_class", "model_max_length", BOS_BEFORE_CHAT}
# Words of a chat template that need transformers' own renderer:
_BEYOND = re.compile(r"\b(dict|namespace|tojson|strftime_now|raise_exception|generation|break|continue)\b")
PIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SAMPLE = "The river is long. Hello, world! 12"
_LARGEST = 100_000  # ids; transformers corrects some larger vocabularies


class Encoded(Json):
    """The ids of a text, as an item and as an attribute."""

    @property
    def input_ids(self) -> list[int]:
        return list(self["input_ids"])


class FileTokenizer:
    """The tokenizer of a folder that :func:`file_tokenizer` takes. `load` makes transformers' own when it is needed."""

    response_template = None  # `file_tokenizer` takes no tokenizer that has one

    def __init__(
        self, backend: "Tokenizer", stored: Mapping[str, str], template: str | None, load: Callable[[], HfTokenizer]
    ) -> None:
        tokens: dict[str, str] = {role: stored[role] for role in ROLES if role in stored}
        self.backend_tokenizer, self.special_tokens_map, self.chat_template = backend, tokens, template
        self.init_kwargs, self._load = dict(stored), load
        for role in ROLES:
            setattr(self, role, tokens.get(role))
            setattr(self, f"{role}_id", backend.token_to_id(tokens[role]) if role in tokens else None)

    @functools.cached_property
    def whole(self) -> HfTokenizer:
        """transformers' tokenizer of the same folder."""
        return self._load()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __call__(self, text: object, add_special_tokens: bool = True, **more: object) -> Any:
        """`input_ids` of a text; several texts and other arguments go to transformers."""
        if more or not isinstance(text, str):
            return self.whole(text, add_special_tokens=add_special_tokens, **more)
        return Encoded(input_ids=self.encode(text, add_special_tokens))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(
        self,
        ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """Return the text of an id or of several."""
        listed = [ids] if isinstance(ids, int) else ids
        ours = isinstance(listed, list | tuple) and all(isinstance(token, int) for token in listed)
        if clean_up_tokenization_spaces or not ours:
            return self.whole.decode(
                ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            )
        return self.backend_tokenizer.decode(list(listed), skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    @property
    def added_tokens_decoder(self) -> "dict[int, AddedToken]":
        return self.backend_tokenizer.get_added_tokens_decoder()

    def apply_chat_template(self, messages: object, chat_template: str | None = None, **options: object) -> Any:
        """Return the chat as text. Templates with transformers' own words, and calls for ids, go to transformers."""
        template, own = chat_template or self.chat_template, {"tokenize", "add_generation_prompt"}
        ours = options.keys() <= own and options.get("tokenize") is False
        if not ours or not messages or template is None or _BEYOND.search(template):
            return self.whole.apply_chat_template(messages, chat_template=chat_template, **options)
        return _compiled(template).render(
            messages=messages,
            add_generation_prompt=options.get("add_generation_prompt", False),
            **{"tools": None, "documents": None, **self.special_tokens_map},
        )


@functools.cache
def _compiled(template: str) -> "Template":
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def file_tokenizer(folder: Path, load: Callable[[], HfTokenizer]) -> FileTokenizer | None:
    """Return the tokenizer in a converted model's folder; None if transformers does more than read `tokenizer.json`.

    `load` makes transformers' own. Raises OSError and ValueError for a file that cannot be read.
    """
    file, *configs = (folder / f"{name}.json" for name in ("tokenizer", "tokenizer_config", "config"))
    if not all(path.is_file() for path in (file, *configs)):
        return None
    stored, model = (json.loads(path.read_text(encoding="utf-8")) for path in configs)
    tokens = {role: stored[role] for role in ROLES if role in stored}
    plain = stored.get("tokenizer_class") == "TokenizersBackend" and model.get("model_type") == "llama"
    known = not stored.keys() - {*ROLES, *_WITHOUT_EFFECT} and all(isinstance(token, str) for token in tokens.values())
    if not (plain and known):
        return None
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    changed = backend.truncation or backend.padding or not {*tokens.values()} <= special
    if changed or backend.get_vocab_size() > _LARGEST:
        return None
    template = folder / "chat_template.jinja"
    return FileTokenizer(backend, stored, template.read_text(encoding="utf-8") if template.is_file() else None, load)


def first_ids(tokenizer: HfTokenizer, text: str) -> list[int]:
    """Return the ids of a text that begins a sequence; of two BOS tokens at its beginning one is removed."""
    ids, bos = list(tokenizer(text)["input_ids"]), getattr(tokenizer, "bos_token_id", None)
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def sentence_pieces(folder: Path) -> list[str] | None:
    """Return a sample's pieces by the sentencepiece model in `folder`; None without one, or with a tokenizer.json."""
    file = next((folder / name for name in PIECE_FILES if (folder / name).is_file()), None)
    if file is None or (folder / "tokenizer.json").is_file():
        return None
    from sentencepiece import SentencePieceProcessor

    with suppress(OSError, RuntimeError):  # tiktoken's files have the same name
        model = SentencePieceProcessor(model_file=str(file))
        return list(model.id_to_piece(model.encode(_SAMPLE)))
    return None


def splitting_so(pieces: list[str], makers: Iterable[Callable[[], HfTokenizer]]) -> HfTokenizer:
    """Return the first tokenizer that splits the sample text into `pieces`. ValueError if none does.

    transformers chooses a class by the model's type, and the class may expect another kind of sentencepiece model.
    """
    for make in makers:
        with suppress(Exception):  # a class that cannot read this model at all
            tokenizer = make()
            if tokenizer.convert_ids_to_tokens(tokenizer.encode(_SAMPLE, add_special_tokens=False)) == pieces:
                return tokenizer
    raise ValueError("no class of transformers splits text as its sentencepiece model does, a tokenizer.json is needed")
