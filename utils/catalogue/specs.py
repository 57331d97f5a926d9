"""What a model and a pair are, as plain validated records, and whether a pair's `cascade`, `k_matrix` and `lenience` go
together. Knows no files of pairs and no torch.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from utils.catalogue.k_matrix import check_lenience, check_shape
from utils.catalogue.templates import check_template
from utils.errors import UsageError, UserError

Quantization = Literal["none", "int8", "nf4", "fp4"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Method = Literal["spec", "glide", "feature", "cascade", "chain", "tables", "maxgram"]

MODELLESS = ("ngram", "tables", "maxgram", "none")  # drafters that are no model
STUDENTS = ("plain", "glide", "feature")  # drafters trained for one target: words for those in the pair's `students`
BEHIND = {f"tables+{kind}": kind for kind in STUDENTS}  # tables first, a trained drafter where they are silent
CASCADES = ("cascade", "chain")  # the drafters of a cascade, with and without reviews between them
DRAFTER_WORDS = (*MODELLESS, *STUDENTS, *BEHIND, *CASCADES)
MEMBERS = ("model", *STUDENTS, "tables", "ngram", "maxgram")  # words in a cascade; `model` is the pair's drafter
REVIEWERS = ("model", "plain", "glide")  # of these the ones that can review what comes after them
TRAINED_METHODS = ("glide", "feature")  # methods whose drafter cannot be a model of its own
OWN_METHODS = ("tables", "maxgram", *CASCADES)  # methods that are their own drafter's word

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+")
FROZEN = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSpec(BaseModel):
    """One model and where it comes from: exactly one of `id`, `path`, `gguf` and `package`."""

    model_config = FROZEN

    name: str = ""  # how it is shown; made from the source if not given
    id: str | None = None  # on the hub
    path: str | None = None  # a folder
    gguf: str | None = None  # a GGUF file
    package: str | None = None  # name==version, with `file` and `sha256`
    file: str | None = None
    sha256: str | None = None
    revision: str | None = None
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    attn_implementation: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        given = [key for key in ("id", "path", "gguf", "package") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"a model needs exactly one of id, path, gguf, package, got {', '.join(given) or 'none'}")
        if self.package is not None:
            if self.file is None or self.sha256 is None:
                raise ValueError("a package needs file and sha256 beside it")
            if not _PACKAGE.fullmatch(self.package):
                raise ValueError(f"package must be name==version, got '{self.package}'")
            if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
                raise ValueError(f"sha256 must be 64 hexadecimal digits, got '{self.sha256}'")
        elif self.file is not None or self.sha256 is not None:
            raise ValueError("file and sha256 belong to a package only")
        if self.id is not None and not _HUB_ID.fullmatch(self.id):
            raise ValueError(f"id must be a hub id like org/name, got '{self.id}'")
        if not self.name:
            object.__setattr__(self, "name", self._source_name())
        return self

    def _source_name(self) -> str:
        if self.id is not None:
            return self.id.rsplit("/", 1)[-1]
        path = Path(self.path or self.gguf or self.file or "")
        return path.stem if path.suffix == ".gguf" else path.resolve().name

    @property
    def source(self) -> str:
        """Where it comes from, in a word: the id, path or package with its file."""
        return self.id or self.path or self.gguf or f"{self.package}:{self.file}"


def _kind(value: Any) -> str:
    return "word" if isinstance(value, str) else "model"


Drafter = Annotated[
    Annotated[ModelSpec, Tag("model")]
    | Annotated[
        Literal[
            "ngram",
            "none",
            "maxgram",
            "tables",
            "plain",
            "glide",
            "feature",
            "tables+plain",
            "tables+glide",
            "tables+feature",
            "cascade",
            "chain",
        ],
        Tag("word"),
    ],
    Discriminator(_kind),
]
Member = Annotated[
    Annotated[ModelSpec, Tag("model")]
    | Annotated[Literal["model", "plain", "glide", "feature", "tables", "ngram", "maxgram"], Tag("word")],
    Discriminator(_kind),
]


class Students(BaseModel):
    """The folders of a pair's trained drafters, by kind."""

    model_config = FROZEN

    plain: str | None = None
    glide: str | None = None
    feature: str | None = None


_SETTINGS: dict[str, Any] = {
    "gamma": int | Literal["auto"],
    **dict.fromkeys(("top_k", "no_repeat_ngram", "max_new_tokens", "seed", "ngram_n", "ngram_filler"), int),
    **dict.fromkeys(("num_beams", "beam_top_k", "min_length", "nodes"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "lenience", "length_penalty"), float),
    **dict.fromkeys(("chat", "ngram_multi_level", "ngram_stop_if_unknown", "ngram_reset"), bool),
    **dict.fromkeys(("ascii", "quiet", "verbose", "debug"), bool),
    **dict.fromkeys(("system", "template", "coupling", "draft_sampling", "verify", "expand"), str),
    **dict.fromkeys(("view", "color", "palette", "data_dir", "record"), str),
    **dict.fromkeys(("compare", "cascade"), str | list[str]),
    "k_matrix": str | list[list[int]],
}

PresetSettings = create_model(  # type: ignore[call-overload]
    "PresetSettings", __config__=FROZEN, **{name: (kind | None, None) for name, kind in _SETTINGS.items()}
)


class PairSpec(BaseModel):
    """A target and how it is drafted for. `defaults` holds the settings it presets, by name.

    A method that is its drafter's word (OWN_METHODS) names the drafter where none is given.
    """

    model_config = FROZEN

    name: str
    target: ModelSpec
    drafter: Drafter = "ngram"
    tables: str | None = None  # the file that the drafter `tables` looks up in
    students: Students = Students()
    cascade: list[Member] | None = None  # drafters, large to small
    arch: Literal["causal", "seq2seq"] = "causal"
    method: Method = "spec"
    k_matrix: list[list[int]] | None = None
    lenience: float | None = None
    template: str | None = None  # the chat template, by name
    defaults: dict[str, Any] = Field(default_factory=dict)
    notes: str = ""

    @field_validator("template")
    @classmethod
    def _known_template(cls, name: str | None) -> str | None:
        if name is not None:
            try:
                check_template(name)
            except UsageError as error:
                raise ValueError(str(error)) from None
        return name

    @model_validator(mode="before")
    @classmethod
    def _drafter_of_the_method(cls, data: Any) -> Any:
        if isinstance(data, dict) and "drafter" not in data and data.get("method") in OWN_METHODS:
            return {**data, "drafter": data["method"]}
        return data

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

    def student(self, kind: str) -> Path:
        """The folder of the trained drafter of this kind; UsageError if the pair has none."""
        folder: str | None = getattr(self.students, kind)
        if folder is not None and os.path.isdir(folder):
            return Path(folder)
        why = "names none" if folder is None else f"names {folder}, which is not there"
        raise UsageError(f"no {kind} drafter: pair '{self.name}' {why} (infer.py distill --student {kind} makes one)")


def trained_kind(drafter: object) -> str | None:
    """The kind of trained drafter that a drafter's word asks for, alone or behind the tables; None for the others."""
    return BEHIND.get(drafter, drafter if drafter in STUDENTS else None) if isinstance(drafter, str) else None


def named_tables(text: str) -> str | None:
    """The file in a drafter's name `tables:FILE`; None for any other name."""
    word, colon, file = text.partition(":")
    return os.path.expanduser(file) if word == "tables" and colon and file else None


def spec_from_argument(text: str) -> ModelSpec:
    """A model named on the command line: a folder, a GGUF file, or else a hub id. Touches no network.

    Raises UsageError if it can be none of them.
    """
    try:
        return ModelSpec.model_validate(source_of(text.strip(), Path()))
    except ValidationError as error:
        raise UsageError(f"'{text}' is no model: expected a folder, a .gguf file or a hub id like org/name") from error


def source_of(text: str, folder: Path) -> dict[str, str]:
    """The short form of a model as ModelSpec fields; relative paths start at `folder`."""
    path = resolved(text, folder) if text else folder / "?"
    if text.endswith(".gguf"):
        return {"gguf": str(path)}
    if text.startswith(("/", "./", "../", "~", ".\\")) or text in (".", "..") or (text and os.path.isdir(path)):
        return {"path": str(path)}
    return {"id": text}


def resolved(text: str, folder: Path) -> Path:
    """`text` as an absolute path; a relative one starts at `folder`."""
    path = Path(os.path.expanduser(text))  # an unknown user's ~ stays as it is, where Path.expanduser raises
    return path if path.is_absolute() else (folder / path).resolve()


class Problem(NamedTuple):
    """What is wrong, and under which key of the pair."""

    key: tuple[str | int, ...]
    text: str


def cascade_problem(pair: PairSpec) -> Problem | None:
    """The first thing that is wrong with how the pair's drafters go together; None if nothing is."""
    members = pair.cascade or []
    if pair.method in OWN_METHODS and pair.drafter != pair.method:
        return Problem(("drafter",), f"method {pair.method} is its own drafter: leave drafter out")
    method = next((word for word in CASCADES if word in (pair.method, pair.drafter)), None)
    if pair.cascade is not None and not members:
        return Problem(("cascade",), "cascade must name a drafter or more, large to small")
    if method is not None and not members:
        return Problem(("method",), f"method {method} needs its drafters, as cascade: [DRAFTER, …]")
    if method is not None and pair.k_matrix is None:
        return Problem(("method",), f"method {method} needs a k_matrix with a row for each drafter of its cascade")
    return next(filter(None, (*_members(pair, method), _matrix(pair), _lenience(pair))), None)


def _members(pair: PairSpec, method: str | None) -> list[Problem | None]:
    names = pair.cascade_names
    return [_member(pair, names, place, method) for place in range(len(names))]


def _member(pair: PairSpec, names: Sequence[str], place: int, method: str | None) -> Problem | None:
    key, name = ("cascade", place), names[place]
    told = None
    if name in names[:place]:
        told = f"cascade names {name} twice"
    elif not isinstance((pair.cascade or [])[place], str):
        if "," in name or name in (*MEMBERS, "target"):  # figures tell models by their names
            told = f"cascade: the model {name} needs another name (name: …)"
    elif name == "model" and (isinstance(pair.drafter, str) and trained_kind(pair.drafter) != "plain"):
        told = f"cascade: model is the pair's drafter model, and the drafter is {pair.drafter_name}"
    elif name in STUDENTS and getattr(pair.students, name) is None:
        told = f"cascade: {name} needs its folder in students, as {name}: DIR"
    elif method == "cascade" and place < len(names) - 1 and name not in REVIEWERS:
        told = f"cascade: {name} cannot review, so it must come last"
    return None if told is None else Problem(key, told)


def _matrix(pair: PairSpec) -> Problem | None:
    if pair.k_matrix is None:
        return None
    if pair.cascade is None:
        return Problem(("k_matrix",), "k_matrix needs a cascade: [DRAFTER, …] beside it")
    try:
        check_shape(pair.k_matrix)
    except UserError as error:
        return Problem(("k_matrix",), str(error))
    if len(pair.k_matrix) == len(pair.cascade):
        return None
    names = ",".join(pair.cascade_names)
    told = f"k_matrix must have {len(pair.cascade)} rows for the cascade {names}, got {len(pair.k_matrix)}"
    return Problem(("k_matrix",), told)


def _lenience(pair: PairSpec) -> Problem | None:
    try:
        check_lenience(1 if pair.lenience is None else pair.lenience)
    except UserError as error:
        return Problem(("lenience",), str(error))
    return None


def presets(pair: PairSpec) -> dict[str, Any]:
    """The settings that the pair presets by its keys of the same names."""
    found = {"cascade": ",".join(pair.cascade_names), "k_matrix": pair.k_matrix, "lenience": pair.lenience}
    found |= {"template": pair.template}
    return {name: value for name, value in found.items() if value}


def unknown_member(text: str) -> str | None:
    """The word that a member of a cascade nearly is, if it is no word, no path and looks like no model's name."""
    if text in MEMBERS or not re.fullmatch(r"[A-Za-z_+]+", text):
        return None
    return next(iter(difflib.get_close_matches(text.lower(), MEMBERS, n=1)), None)
