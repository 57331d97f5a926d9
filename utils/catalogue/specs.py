"""A model and a pair as validated records, and whether a pair's keys go together.

The caller gives the words for drafters and the settings that a catalogue may hold (:class:`KnownNames`). Imports no
torch.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from utils.catalogue.heads import HEAD_KINDS, PUBLISHED_KINDS
from utils.catalogue.templates import check_template
from utils.errors import UsageError, UserError, did_you_mean, holding, nearest, number, raise_first, shown
from utils.files import hash_of
from utils.objects import Json
from utils.remote.server import OWN, is_url, server_at

CASCADES = ("cascade", "chain")  # the words for several drafters in a row, with and without reviews between them
TRAINED_METHODS = ("glide", "feature")  # methods whose drafter must be a draft head
OWN_METHODS = ("tables", "maxgram", *CASCADES)  # methods that are also the word of their drafter

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\{\d{1,4}\.\.\d{1,4}\}[A-Za-z0-9._-]*)?==[A-Za-z0-9.+!]+")
_SEVERAL = re.compile(r"\{(\d+)\.\.(\d+)\}")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"-\d{5}-of-(\d{5})$")  # after the name of a split GGUF file, before .gguf
Matrix = tuple[tuple[int, ...], ...]
MOST = 1000  # tokens of one entry, far beyond any use, so that a typing error does not draft for hours
FROZEN = ConfigDict(extra="forbid", frozen=True, strict=True)


class KnownNames(NamedTuple):
    """The words and keys of a catalogue: those of `drafter`, those in a `cascade`, those that can review the drafters
    after them, and the type of every setting by its name. `check` raises UsageError for a wrong value of a setting."""

    drafters: Collection[str]
    members: Collection[str]
    reviewers: Collection[str]
    settings: Mapping[str, object]
    check: Callable[[Mapping[str, object]], object]


def _unlike(pattern: re.Pattern[str], text: str | None) -> bool:
    return text is not None and not pattern.fullmatch(text)


class ModelSpec(BaseModel):
    """One model and where it comes from: exactly one of `id`, `path`, `gguf`, `package` and `url`.

    A `package` holds the GGUF `file`, or each of several (`name-part{1..22}==1.0`) a part of it; `repository` has the
    same file on the hub. `sha256` is that of the whole file. A `url` is a server's, which knows the model as `model`
    and takes the key in the environment variable `key_env`.
    """

    model_config = FROZEN

    name: str = ""  # for the screen; by default from the source
    id: str | None = None  # on the hub
    path: str | None = None  # a folder
    gguf: str | None = None  # a GGUF file
    package: str | None = None  # name==version, with `file` and `sha256`
    file: str | None = None
    sha256: str | None = None
    size: int | None = Field(default=None, ge=1)  # bytes of the file: for progress, and to check the disk before
    repository: str | None = None  # on the hub, at `revision`
    url: str | None = None  # a server's: ends in /v1 for OpenAI's protocol, in /api for Ollama's
    model: str | None = None
    key_env: str | None = None
    tokenizer: "ModelSpec | None" = None  # the model that has the server's tokenizer, where drafts are made here
    revision: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantization: Literal["none", "q4", "q8", "int8", "nf4", "fp4"] = "none"
    attn_implementation: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSpec":
        given = [key for key in ("id", "path", "gguf", "package", "url") if getattr(self, key) is not None]
        packed, beside = self.package is not None, (self.file, self.sha256)
        wrong = {
            f"a model needs exactly one of id, path, gguf, package, url, got {', '.join(given) or 'none'}": len(given)
            != 1,
            "a package needs file and sha256 beside it": packed and None in beside,
            "file, sha256, size and repository belong to a package only": not packed
            and (*beside, self.size, self.repository) != (None,) * 4,
            "model, key_env and tokenizer belong to a url only": self.url is None
            and (self.model, self.key_env, self.tokenizer) != (None, None, None),
            f"url must begin with http:// or https://, got '{self.url}'": self.url is not None and not is_url(self.url),
            f"package must be name==version, got '{self.package}'": _unlike(_PACKAGE, self.package),
            f"sha256 must be 64 hexadecimal digits, got '{self.sha256}'": _unlike(_SHA256, self.sha256),
            f"id must be a hub id like org/name, got '{self.id}'": _unlike(_HUB_ID, self.id),
            f"repository must be a hub id like org/name, got '{self.repository}'": _unlike(_HUB_ID, self.repository),
        }
        raise_first(wrong, ValueError)
        if not self.name:
            object.__setattr__(self, "name", self._source_name())
        return self

    @property
    def packages(self) -> tuple[str, ...]:
        """The package, or the packages that hold the parts of the file, in their order."""
        if self.package is None:
            return ()
        if (several := _SEVERAL.search(self.package)) is None:
            return (self.package,)
        before, after = self.package[: several.start()], self.package[several.end() :]
        return tuple(f"{before}{number}{after}" for number in range(int(several[1]), int(several[2]) + 1))

    @property
    def of_gguf(self) -> bool:
        """Whether its weights come as a GGUF file."""
        return self.gguf is not None or self.package is not None

    def _source_name(self) -> str:
        if self.url is not None:
            return server_at(self.url, self.model).name
        if self.id is not None:
            return self.id.rsplit("/", 1)[-1]
        path = Path(self.path or self.gguf or self.file or "")
        return _PART.sub("", path.stem) if path.suffix == ".gguf" else path.resolve().name

    @property
    def source(self) -> str:
        """The id, the path, the URL, or the package with its file."""
        return self.url or self.id or self.path or self.gguf or f"{self.package}:{self.file}"

    def weights(self, revision: str | None = None) -> str:
        """Return a mark of its weights: URL and model, hub id and revision, or a hash of the files."""
        if self.url is not None:
            return f"{self.url}#{self.model or ''}"
        if self.id is not None:
            return f"{self.id}@{revision or self.revision or 'main'}"
        return self.sha256 or weights_at(self.path or self.gguf or "")


def weights_at(source: str) -> str:
    """Return a hash of the weights in a file, or in a folder with their configuration; "" if there are none.

    UserError if they cannot be read.
    """
    path = Path(os.path.expanduser(source))
    known = [file for file in path.glob("*") if file.suffix in _WEIGHTS or file.name == "config.json"]
    return hash_of([file for file in sorted(known) or gguf_parts(path) if file.is_file()], sampled=True)


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Return all parts of a split GGUF file by their names, from the name of one of them; `path` alone under another
    name.
    """
    named = _PART.search(path.stem)
    if named is None or path.suffix != ".gguf":
        return (path,)
    begin, count = path.stem[: named.start()], int(named[1])
    return tuple(path.with_name(f"{begin}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


class PairSpec(BaseModel):
    """A target and how it is drafted for. `defaults` holds the settings it presets, by name."""

    model_config = FROZEN

    name: str
    target: ModelSpec
    drafter: ModelSpec | str = "ngram"  # a model, or a drafter's word
    beside: Literal["match", "tables"] | None = None  # a table that drafts beside a drafter model
    tables: str | None = None  # the file that the drafter `tables` looks up in
    # Folders or GGUF files of trained draft heads, by HEAD_KINDS:
    students: dict[str, str] = Field(default_factory=dict)
    cascade: list[ModelSpec | str] | None = None  # drafters, large to small
    arch: Literal["causal", "seq2seq"] = "causal"
    method: Literal["spec", "glide", "feature", "cascade", "chain", "tables", "maxgram"] = "spec"
    k_matrix: list[list[int]] | None = None
    lenience: float | None = None
    template: str | None = None  # the chat template, by name
    defaults: Json = Field(default_factory=dict)
    notes: str = ""

    @property
    def drafter_name(self) -> str:
        return self.drafter if isinstance(self.drafter, str) else self.drafter.name

    @property
    def cascade_names(self) -> tuple[str, ...]:
        """The cascade's words and models' names, large to small, as the setting `cascade` takes them."""
        return tuple(member if isinstance(member, str) else member.name for member in self.cascade or ())

    @property
    def cascade_models(self) -> tuple[ModelSpec, ...]:
        """The models that the cascade brings along."""
        return tuple(member for member in self.cascade or () if not isinstance(member, str))

    def head_folder(self, kind: str) -> Path:
        """Return the folder, or GGUF file, of the trained draft head of this kind; UsageError if the pair has none."""
        folder = self.students.get(kind)
        if folder is not None and os.path.exists(folder):
            return Path(folder)
        why = "names none" if folder is None else f"names {folder}, which is not there"
        how = "--drafter ORG/NAME fetches" if kind in PUBLISHED_KINDS else f"infer.py distill --student {kind} makes"
        raise UsageError(f"no {kind} drafter: pair '{self.name}' {why} ({how} one)")

    def weights(self, revision: str | None = None) -> dict[str, str]:
        """Marks of the weights of its models, draft heads and tables, by their roles in the pair.

        `revision` is the target's. UserError for a file that cannot be read.
        """
        drafters = {"drafter": self.drafter, **dict(zip(self.cascade_names, self.cascade or (), strict=True))}
        sources = {**self.students, **({"tables": self.tables} if self.tables else {})}
        return {
            "target": self.target.weights(revision),
            **{name: model.weights() for name, model in drafters.items() if not isinstance(model, str)},
            **{name: weights_at(source) for name, source in sources.items()},
        }

    @property
    def presets(self) -> Json:
        """The settings that its keys of the same names preset, and `compare` for a server's pair."""
        compare = (OWN if self.target.tokenizer is None else f"{OWN},spec") if self.target.url else None
        settings = {
            "compare": compare,
            "cascade": ",".join(self.cascade_names),
            "k_matrix": self.k_matrix,
            "lenience": self.lenience,
            "template": self.template,
        }
        return {name: value for name, value in settings.items() if value}


def head_kind_of(drafter: object) -> str | None:
    """Return the kind of draft head that a drafter's word names, alone or after a `+`; None for the others."""
    kind = drafter.rpartition("+")[2] if isinstance(drafter, str) else ""
    return kind if kind in HEAD_KINDS else None


def named_tables(text: str) -> str | None:
    """Return the file in a drafter's name `tables:FILE`; None for any other name."""
    word, _, file = text.partition(":")
    return os.path.expanduser(file) if word == "tables" and file else None


def spec_from_argument(text: str) -> ModelSpec:
    """Return a model named on the command line: a URL, a folder, a GGUF file, or else a hub id. Touches no network.

    Raises UsageError if it can be none of them.
    """
    try:
        return ModelSpec.model_validate(source_of(text.strip(), Path()))
    except ValidationError as error:
        raise UsageError(f"'{text}' is no model: expected a folder, a .gguf file or a hub id like org/name") from error


def source_of(text: str, folder: Path) -> dict[str, str]:
    """Return the short form of a model as ModelSpec fields; relative paths start at `folder`."""
    if is_url(text):
        return {"url": text}
    path = resolved(text, folder) if text else folder / "?"
    if text.endswith(".gguf") or (os.path.isfile(path) and is_gguf(path)):
        return {"gguf": str(path)}
    is_folder = os.path.isdir(path)
    if is_folder and not (path / "config.json").is_file():
        files = {gguf_parts(file)[0] for file in path.glob("*.gguf")}
        if len(files) == 1:
            return {"gguf": str(*files)}
    as_path = text.startswith(("/", "./", "../", "~", ".\\")) or text in (".", "..") or (text and is_folder)
    return {"path": str(path)} if as_path else {"id": text}


def resolved(text: str, folder: Path) -> Path:
    """`text` as an absolute path; a relative one starts at `folder`."""
    path = Path(os.path.expanduser(text))  # an unknown user's ~ stays as it is, where Path.expanduser raises
    return path if path.is_absolute() else (folder / path).resolve()


# -- the K matrix of Cascade Speculative Drafting (arXiv 2312.11462, algorithm 1) ---------------------------
#
# Row r is the reviewer (0 = the target, r = drafter r of the list, large to small); column c is the number of tokens
# that drafter c + 1 adds to the draft that r reviews.


def check_shape(matrix: Any) -> Matrix:
    """`matrix` (rows, or a tensor or array of them) as tuples; UserError unless it is square, of whole numbers from 0
    on, and upper triangular.
    """
    rows = matrix.tolist() if hasattr(matrix, "tolist") else matrix
    if not _is_sequence(rows) or not rows or not all(map(_is_sequence, rows)):
        raise UserError(f"k_matrix must be rows of whole numbers like [[5,10],[0,10]], got {shown(rows)}")
    for size in (len(row) for row in rows if len(row) != len(rows)):
        raise UserError(f"k_matrix must be square: {len(rows)} rows, but one of them has {size} numbers")
    for r, row in enumerate(rows):
        for c, entry in enumerate(row):
            raise_first(
                {
                    f"k_matrix must hold whole numbers from 0 to {MOST}, got {shown(entry)} in row {r + 1}": (
                        not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry <= MOST
                    ),
                    f"k_matrix must be upper triangular: row {r + 1}, column {c + 1} must be 0, got {entry}": (
                        c < r and entry
                    ),
                },
                UserError,
            )
    return tuple(tuple(row) for row in rows)


def check_fit(matrix: object, drafters: int) -> Matrix:
    """Return the matrix as :func:`check_shape` does; UserError also unless it has a row for each drafter."""
    checked = check_shape(matrix)
    if len(checked) != drafters:
        raise UserError(f"k_matrix must have a row for each of the {drafters} drafters, got {len(checked)}")
    return checked


def check_lenience(value: float) -> float:
    """`value` if it is a finite number from 1 on, else UserError. 1 is exact, a larger value accepts more."""
    return number("lenience", value, lambda lenience: lenience >= 1, "a number, at least 1")


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def problems(pair: PairSpec, known: KnownNames) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Each contradiction between the pair's keys, in a fixed order: a key in the pair, and what contradicts it."""
    drafter, kind, members = pair.drafter, head_kind_of(pair.drafter), pair.cascade_names
    for key in pair.students.keys() - {*HEAD_KINDS}:
        yield ("students", key), f"unknown key '{key}'{did_you_mean(key, HEAD_KINDS)}"
    method = next((word for word in CASCADES if word in (pair.method, drafter)), None)
    trained = pair.method in TRAINED_METHODS and isinstance(drafter, str)
    contradictions = [
        (
            kind is not None and kind not in pair.students,
            "drafter",
            f"drafter {drafter} needs its folder in students, as {kind}: DIR",
        ),
        (
            trained and kind != pair.method,
            "method",
            f"method {pair.method} needs a {pair.method} drafter, got {drafter}",
        ),
        (
            pair.method in OWN_METHODS and drafter != pair.method,
            "drafter",
            f"method {pair.method} is its own drafter: leave drafter out",
        ),
        (
            pair.cascade is not None and not members,
            "cascade",
            "cascade must name a drafter or more, large to small",
        ),
        (
            method is not None and not members,
            "method",
            f"method {method} needs its drafters, as cascade: [DRAFTER, …]",
        ),
        (
            method is not None and pair.k_matrix is None,
            "method",
            f"method {method} needs a k_matrix with a row for each drafter of its cascade",
        ),
        (
            pair.k_matrix is not None and pair.cascade is None,
            "k_matrix",
            "k_matrix needs a cascade: [DRAFTER, …] beside it",
        ),
    ]
    yield from (((key,), text) for holds, key, text in contradictions if holds)
    for key, model in (("drafter", drafter), *(("cascade", model) for model in pair.cascade_models)):
        if isinstance(model, ModelSpec) and model.url is not None:
            yield (key,), f"{key}: a server cannot draft, got {model.url}"
    for index, name in enumerate(members):
        if (problem := _member_problem(pair, index, name, known, method)) is not None:
            yield ("cascade", index), problem
    checks: dict[str, Callable[..., object]] = {
        "k_matrix": partial(check_fit, drafters=len(members)),
        "lenience": check_lenience,
        "template": check_template,
    }
    for key in (key for key in checks if getattr(pair, key) is not None):
        try:
            checks[key](getattr(pair, key))
        except UserError as error:
            yield (key,), f"template: {error}" if key == "template" else str(error)


def _member_problem(pair: PairSpec, index: int, name: str, known: KnownNames, method: str | None) -> str | None:
    names = pair.cascade_names
    word = name if isinstance((pair.cascade or [])[index], str) else ""
    of_word = isinstance(pair.drafter, str) and head_kind_of(pair.drafter) != "plain"
    taken = "," in name or name in (*known.members, "target")  # columns of results are named after models
    last = method != "cascade" or index == len(names) - 1
    wrong = holding(
        {
            f"cascade names {name} twice": name in names[:index],
            f"cascade: the model {name} needs another name (name: …)": taken and not word,
            f"cascade: model is the pair's drafter model, and the drafter is {pair.drafter_name}": word == "model"
            and of_word,
            f"cascade: {name} needs its folder in students, as {name}: DIR": word in HEAD_KINDS
            and word not in pair.students,
            f"cascade: {name} cannot review, so it must come last": word and not last and word not in known.reviewers,
        }
    )
    return wrong[0] if wrong else None


def unknown_member(text: str, words: Collection[str]) -> str | None:
    """Return the word that a cascade's member nearly is; None for a word, a path and what looks like a model's name."""
    return nearest(text, words) if text not in words and re.fullmatch(r"[A-Za-z_+]+", text) else None
