"""models.yaml → validated pairs; an error names file, line, key and, where it can, the key meant.

What kind of drafter lies in a folder is told by its configuration alone, by the rule of
sampling/drafters/draft_heads/checkpoint.py, which this package may not ask (a test compares them). Knows neither what
the settings do that a catalogue may preset, nor how models are loaded. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from utils.catalogue.specs import (
    DRAFTER_WORDS,
    FROZEN,
    MEMBERS,
    STUDENTS,
    TRAINED_METHODS,
    ModelSpec,
    PairSpec,
    PresetSettings,
    Students,
    cascade_problem,
    presets,
    resolved,
    source_of,
    trained_kind,
    unknown_member,
)
from utils.catalogue.yaml_lines import Tree, YamlError, read_yaml
from utils.errors import UsageError

FORMAT = "speculative-console student"
_GLIDE = "large_num_attention_heads"  # a Llama configuration with this key is a published GLIDE drafter's


class Catalogue(BaseModel):
    """All pairs of a file, `default` among them. `defaults` presets settings for every pair.

    Each pair's own `defaults` already include these.
    """

    model_config = FROZEN

    default: str
    pairs: dict[str, PairSpec]
    defaults: dict[str, Any] = Field(default_factory=dict)
    file: str = ""

    def pair(self, name: str | None = None) -> PairSpec:
        """The pair `name`, or the default one; UsageError for an unknown name."""
        wanted = self.default if name is None else name
        if wanted in self.pairs:
            return self.pairs[wanted]
        raise UsageError(f"{self.file}: no pair '{wanted}'{_meant(wanted, self.pairs)}: have {', '.join(self.pairs)}")


def load_catalogue(path: str | Path) -> Catalogue:
    """Read and validate a catalogue; relative paths in it start at its folder.

    Raises UsageError in one line: `FILE:LINE: pair 'x': what is wrong`.
    """
    file = Path(os.path.expanduser(path))
    try:
        tree = read_yaml(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no catalogue {file}: name an existing file with --models") from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line, at, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n"), error.object[error.start]
        raise UsageError(f"{file}:{line}: byte {at} is 0x{byte:02x}, which is no UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read the catalogue {file}: {' '.join(str(error).split())}") from error
    except YamlError as problem:
        raise UsageError(f"{file}:{problem.line}: {_printable(problem.text)}") from problem
    return _Reader(file, tree).catalogue()


class _Reader:
    """Turns one parsed file into a Catalogue; knows its lines."""

    _TOP = ("default", "defaults", "pairs")

    def __init__(self, file: Path, tree: Tree) -> None:
        self.file = file
        self.tree = tree

    def catalogue(self) -> Catalogue:
        data = self.tree.data
        if data is None:
            self.fail((), "the file is empty: a catalogue needs `pairs`")
        if not isinstance(data, dict):
            self.fail((), f"a catalogue is a mapping with `pairs`, got {_shown(data)}")
        for key in data:
            if key not in self._TOP:
                self.fail((key,), f"unknown key '{key}'{_meant(key, self._TOP)}")
        listed = data.get("pairs")
        if not isinstance(listed, dict) or not listed:
            self.fail(("pairs",), f"`pairs` must map names to pairs, got {_shown(listed)}")
        defaults = self.settings(("defaults",), data.get("defaults"), "defaults")
        pairs = {name: self.pair(name, listed[name], defaults) for name in listed}
        default = data.get("default", next(iter(pairs)))
        if not isinstance(default, str):
            self.fail(("default",), f"default must be a pair's name, got {_shown(default)}")
        if default not in pairs:
            self.fail(("default",), f"default: no pair '{default}'{_meant(default, pairs)}")
        return Catalogue(default=default, pairs=pairs, defaults=defaults, file=str(self.file))

    def pair(self, name: str, data: Any, defaults: dict[str, Any]) -> PairSpec:
        path, label = ("pairs", name), f"pair '{name}'"
        if not isinstance(data, dict):
            self.fail(path, f"{label} must be a mapping with a target, got {_shown(data)}")
        if "name" in data:
            self.fail((*path, "name"), f"{label}: unknown key 'name' (the pair's key is its name)")
        own = self.settings((*path, "defaults"), data.get("defaults"), label)
        models = {key: self.model(data[key], DRAFTER_WORDS) for key in ("target", "drafter") if key in data}
        if isinstance(data.get("cascade"), list):
            models["cascade"] = self.members((*path, "cascade"), data["cascade"], label)
        if isinstance(data.get("tables"), str):
            models["tables"] = str(resolved(data["tables"], self.file.parent))
        if "students" in data:
            models["students"] = self.students((*path, "students"), data["students"], label)
        try:
            pair = PairSpec.model_validate({**data, **models, "name": name})
        except ValidationError as error:
            self.refuse(path, label, error, PairSpec)
        self.check_drafter(path, label, pair)
        return pair.model_copy(update={"defaults": {**defaults, **presets(pair), **own}})

    def students(self, path: tuple[str | int, ...], data: Any, label: str) -> dict[str, Any]:
        """The folders of trained drafters by kind, made absolute; their kinds and types are checked later."""
        if not isinstance(data, dict):
            self.fail(path, f"{label}: students must map {', '.join(STUDENTS)} to folders, got {_shown(data)}")
        for key, value in data.items():
            if value is None:
                self.fail((*path, key), f"{label}: students.{key} has no value")
        folder = self.file.parent
        return {key: str(resolved(value, folder)) if isinstance(value, str) else value for key, value in data.items()}

    def members(self, path: tuple[str | int, ...], data: list[Any], label: str) -> list[Any]:
        """The drafters of a cascade; a text that is nearly one of the words is refused."""
        for place, value in enumerate(data):
            near = unknown_member(value) if isinstance(value, str) else None
            if near is not None and not os.path.isdir(resolved(value, self.file.parent)):
                self.fail((*path, place), f"{label}: cascade: no drafter '{value}' (did you mean '{near}'?)")
        return [self.model(value, MEMBERS) for value in data]

    def check_drafter(self, path: tuple[str | int, ...], label: str, pair: PairSpec) -> None:
        """A trained drafter's word needs its folder, its method a fitting drafter, and a cascade its K matrix."""
        drafter, kind = pair.drafter, trained_kind(pair.drafter)
        if kind is not None and getattr(pair.students, kind) is None:
            self.fail((*path, "drafter"), f"{label}: drafter {drafter} needs its folder in students, as {kind}: DIR")
        if pair.method in TRAINED_METHODS and isinstance(drafter, str) and kind != pair.method:
            self.fail((*path, "method"), f"{label}: method {pair.method} needs a {pair.method} drafter, got {drafter}")
        if (problem := cascade_problem(pair)) is not None:
            self.fail((*path, *problem.key), f"{label}: {problem.text}")

    def settings(self, path: tuple[str | int, ...], data: Any, label: str) -> dict[str, Any]:
        """The settings preset under `path`, their names and types checked."""
        if data is None:
            return {}
        if not isinstance(data, dict):
            self.fail(path, f"{label}: defaults must map settings to values, got {_shown(data)}")
        try:
            PresetSettings.model_validate(data)
        except ValidationError as error:
            self.refuse(path, label, error, PresetSettings)
        for key, value in data.items():
            if value is None:
                self.fail((*path, key), f"{label}: {key} has no value")
        return dict(data)

    def model(self, value: Any, words: Sequence[str]) -> Any:
        """A short form made long, and a relative path made absolute; one of the `words` stays."""
        if isinstance(value, str):
            if value in words:
                return value
            value = source_of(value, self.file.parent)
        if not isinstance(value, dict):
            return value
        moved = {
            key: str(resolved(value[key], self.file.parent))
            for key in ("path", "gguf")
            if isinstance(value.get(key), str)
        }
        return {**value, **moved}

    def refuse(
        self, path: tuple[str | int, ...], label: str, error: ValidationError, kind: type[BaseModel]
    ) -> NoReturn:
        """Fail with the first thing pydantic found, at its line."""
        first = error.errors()[0]
        where = path
        for part in first["loc"]:  # union tags are no keys
            if (*where, part) in self.tree.lines or first["type"] == "missing":
                where = (*where, part)
        self.fail(where, f"{label}: {_told(first, where[len(path) :], kind)}")

    def fail(self, path: tuple[str | int, ...], text: str) -> NoReturn:
        raise UsageError(f"{self.file}:{self.tree.line(path)}: {_printable(text)}")


_MODEL = "a model (id, folder, file or mapping)"
_KINDS = {
    "model_type": _MODEL,
    "model_attributes_type": _MODEL,
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
}


def _told(error: ErrorDetails, where: tuple[str | int, ...], kind: type[BaseModel]) -> str:
    """One pydantic error in the house's words."""
    key = ".".join(str(part) for part in where if part not in ("model", "word"))
    last = str(where[-1]) if where else ""
    if error["type"] == "extra_forbidden":
        inside: type[BaseModel] = Students if where[0] == "students" else ModelSpec
        names = inside.model_fields if len(where) > 1 else kind.model_fields
        return f"unknown key '{last}'{_meant(last, names)}"
    if error["type"] == "missing":
        return f"needs a {last}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']!s}" if key else str(error["ctx"]["error"])
    if error["type"] in _KINDS:
        said = _KINDS[error["type"]]
    else:
        said = error["msg"].removeprefix("Input should be ").replace("a valid ", "a ")
    return f"{key} must be {said}, got {_shown(error['input'])}"


def _printable(text: str) -> str:
    """The text on one line, as a key of several lines or with an escape sequence is shown, too."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _meant(key: str, names: Any) -> str:
    close = difflib.get_close_matches(key, list(names), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def student_kind(folder: str | Path) -> str | None:
    """ "plain", "glide" or "feature" if a trained drafter lies in `folder`; None for anything else."""
    try:
        config: Any = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not (config.get("student") == FORMAT or _GLIDE in config):
        return None
    kind = config.get("kind", "glide" if _GLIDE in config else "plain")
    return kind if kind in STUDENTS else None
