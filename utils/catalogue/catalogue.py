"""models.yaml → validated pairs; an error names file, line, key and, if one is near, the right key.

Also finds the kind of the draft head in a folder. Imports no torch.
"""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zipfile import BadZipFile, ZipFile

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from utils.catalogue.heads import BLOCK_KINDS, HEAD_KINDS
from utils.catalogue.specs import (
    FROZEN,
    OWN_METHODS,
    KnownNames,
    ModelSpec,
    PairSpec,
    problems,
    resolved,
    source_of,
    unknown_member,
)
from utils.errors import UsageError, UserError, did_you_mean, holding, printable, shown
from utils.files import read_object
from utils.objects import Json

FORMAT = "speculative-console student"
_GLIDE = "large_num_attention_heads"  # a Llama configuration with this key is a published GLIDE drafter's
_KIND_BY_WEIGHT = {  # kinds by the names of their weights
    "glide": re.compile(rb"model\.layers\.0\.cross_attn\.q_proj\.weight"),
    "peagle": re.compile(rb"(?<![\w.])(model\.)?mask_hidden"),
    "eagle": re.compile(rb"(?<![\w.])(model\.)?fc\.weight"),
}
_SHIPPED = re.compile(rb'"mtp\.fc\.weight"|"model\.layers\.\d+\.eh_proj\.weight"')
_NO_TEXT = re.compile("[\\0\\ud800-\\udfff]")  # no file name can have them
Where = tuple[str | int, ...]
Checked = TypeVar("Checked", bound=BaseModel)


class Catalogue(BaseModel):
    """All pairs of a file, `default` among them. `defaults` presets settings for every pair.

    Each pair's own `defaults` already include these.
    """

    model_config = FROZEN

    default: str
    pairs: dict[str, PairSpec]
    defaults: Json = Field(default_factory=dict)
    file: str = ""

    def pair(self, name: str | None = None) -> PairSpec:
        """Return the pair `name`, or the default one; UsageError for an unknown name."""
        wanted = self.default if name is None else name
        if wanted in self.pairs:
            return self.pairs[wanted]
        raise UsageError(
            f"{self.file}: no pair '{wanted}'{did_you_mean(wanted, self.pairs)}: have {', '.join(self.pairs)}"
        )


def load_catalogue(path: str | Path, known: KnownNames) -> Catalogue:
    """Read and validate a catalogue; relative paths in it start at its folder.

    Raises UsageError in one line: `FILE:LINE: pair 'x': the mistake`.
    """
    file = Path(os.path.expanduser(path))
    try:
        tree = read_yaml(file.read_text(encoding="utf-8", errors="surrogateescape"))  # read_yaml refuses surrogates
    except FileNotFoundError as error:
        raise UsageError(f"no catalogue {file}: name an existing file with --models") from error
    except OSError as error:
        raise UsageError(f"cannot read the catalogue {file}: {' '.join(str(error).split())}") from error
    except YamlError as problem:
        raise UsageError(printable(f"{file}:{problem}")) from problem
    return _Reader(file, tree, known).catalogue()


class _Reader:
    """Turns one parsed file into a Catalogue; knows its lines."""

    _TOP = ("default", "defaults", "pairs")

    def __init__(self, file: Path, tree: "YamlTree", known: KnownNames) -> None:
        self.file, self.tree, self.known = file, tree, known
        types = {name: (kind, None) for name, kind in known.settings.items()}
        self.presets: type[BaseModel] = create_model("PresetSettings", __config__=FROZEN, **types)  # type: ignore[call-overload]

    def catalogue(self) -> Catalogue:
        data = self.tree.data
        if not isinstance(data, dict):
            raise self.wrong(
                (),
                "the file is empty: a catalogue needs `pairs`"
                if data is None
                else f"a catalogue is a mapping with `pairs`, got {_shown(data)}",
            )
        if (key := next((key for key in data if key not in self._TOP), None)) is not None:
            raise self.wrong((key,), f"unknown key '{key}'{did_you_mean(key, self._TOP)}")
        listed = data.get("pairs")
        if not isinstance(listed, dict) or not listed:
            raise self.wrong(("pairs",), f"`pairs` must map names to pairs, got {_shown(listed)}")
        defaults = self.settings(("defaults",), data.get("defaults"), "defaults")
        pairs = {name: self.pair(name, listed[name], defaults) for name in listed}
        default = data.get("default", next(iter(pairs)))
        if not isinstance(default, str):
            raise self.wrong(("default",), f"default must be a pair's name, got {_shown(default)}")
        if default not in pairs:
            raise self.wrong(("default",), f"default: no pair '{default}'{did_you_mean(default, pairs)}")
        return Catalogue(default=default, pairs=pairs, defaults=defaults, file=str(self.file))

    def pair(self, name: str, data: object, defaults: Json) -> PairSpec:
        path, label = ("pairs", name), f"pair '{name}'"
        if not isinstance(data, dict):
            raise self.wrong(path, f"{label} must be a mapping with a target, got {_shown(data)}")
        if "name" in data:
            raise self.wrong((*path, "name"), f"{label}: unknown key 'name' (the pair's key is its name)")
        own = self.settings((*path, "defaults"), data.get("defaults"), label)
        if "drafter" not in data and data.get("method") in OWN_METHODS:
            data = {**data, "drafter": data["method"]}
        read = {key: self.model(data[key], self.known.drafters) for key in ("target", "drafter") if key in data}
        read |= {"tables": self.absolute(data["tables"])} if "tables" in data else {}
        drafters, heads = data.get("cascade"), data.get("students")
        read |= {"cascade": self.members((*path, "cascade"), drafters, label)} if isinstance(drafters, list) else {}
        if isinstance(heads, dict):
            read["students"] = {key: self.absolute(value) for key, value in heads.items()}
        pair = self.checked(PairSpec, {**data, **read, "name": name}, path, label)
        for key, problem in problems(pair, self.known):
            raise self.wrong((*path, *key), f"{label}: {problem}")
        return pair.model_copy(update={"defaults": {**defaults, **pair.presets, **own}})

    def members(self, path: Where, data: list[Any], label: str) -> list[object]:
        """Return the drafters of a cascade; refuses a text that is nearly one of the words."""
        for at, value in enumerate(data):
            near = unknown_member(value, self.known.members) if isinstance(value, str) else None
            if near is not None and not os.path.isdir(resolved(value, self.file.parent)):
                raise self.wrong((*path, at), f"{label}: cascade: no drafter '{value}' (did you mean {near}?)")
        return [self.model(value, self.known.members) for value in data]

    def settings(self, path: Where, data: object, label: str) -> Json:
        """Return the settings preset under `path`, their names, types and values checked."""
        if data is None:
            return {}
        if not isinstance(data, dict):
            raise self.wrong(path, f"{label}: defaults must map settings to values, got {_shown(data)}")
        self.checked(self.presets, data, path, label)
        for name, value in data.items():
            try:
                self.known.check({name: value})
            except UsageError as error:
                raise self.wrong((*path, name), f"{label}: {error}") from None
        return dict(data)

    def model(self, value: object, words: Collection[str]) -> object:
        """Return a model with its short form expanded and its relative path absolute; one of the `words` stays."""
        if isinstance(value, str):
            return value if value in words else source_of(value, self.file.parent)
        if not isinstance(value, dict):
            return value
        known = {key: self.absolute(part) if key in ("path", "gguf") else part for key, part in value.items()}
        return {**known, "tokenizer": self.model(value["tokenizer"], ())} if "tokenizer" in value else known

    def absolute(self, value: object) -> object:
        """Return a relative path as an absolute one; other values stay and are refused later."""
        return str(resolved(value, self.file.parent)) if isinstance(value, str) else value

    def checked(self, kind: type[Checked], data: object, path: Where, label: str) -> Checked:
        """Return the record; raises the first error of pydantic, with its line."""
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            first, where = error.errors()[0], path
        for part in first["loc"]:  # union tags are no keys
            if (*where, part) in self.tree.lines or first["type"] == "missing":
                where = (*where, part)
        raise self.wrong(where, f"{label}: {_line_for(first, where[len(path) :], kind)}")

    def wrong(self, path: Where, text: str) -> UsageError:
        """Return the error for a mistake under `path`, in one line."""
        return UsageError(printable(f"{self.file}:{self.tree.line(path)}: {text}"))


_MODEL = "a model (id, folder, file or mapping)"
_KINDS = {  # pydantic's types of error → the allowed values, in words
    "model_type": _MODEL,
    "model_attributes_type": _MODEL,
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": f"a mapping of {', '.join(HEAD_KINDS)} to folders",
}


def _line_for(error: ErrorDetails, where: Where, kind: type[BaseModel]) -> str:
    """Return a pydantic error in our words."""
    key, last, mistake = ".".join(map(str, where)), str(where[-1]) if where else "", error["type"]
    if mistake == "extra_forbidden":
        return f"unknown key {shown(last)}{did_you_mean(last, (ModelSpec if len(where) > 1 else kind).model_fields)}"
    if mistake == "missing":
        return f"needs a {last}"
    if mistake == "value_error":
        return f"{key}: {error['ctx']['error']!s}" if key else str(error["ctx"]["error"])
    allowed = _KINDS.get(mistake, error["msg"].removeprefix("Input should be ").replace("a valid ", "a "))
    return f"{key} must be {allowed}, got {_shown(error['input'])}"


def _shown(value: object) -> str:
    return "nothing" if value is None else shown(value)


# -- YAML with lines ------------------------------------------------------------------------------------


class YamlError(Exception):
    """LINE: a sentence on the mistake there; lines are counted from 1."""


class YamlTree(NamedTuple):
    """`data` as yaml.safe_load gives it; `lines[path]` the line on which the key at that path stands."""

    data: Any
    lines: dict[Where, int]

    def line(self, path: Where) -> int:
        """Return the line of the deepest known key on the way to `path`; 1 if there is none."""
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), 1)


def read_yaml(text: str) -> YamlTree:
    """Parse `text`. Raises YamlError for broken syntax, duplicate keys and keys that are no text."""
    loader: Any = None
    lines: dict[Where, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return YamlTree(None if node is None else _plain(loader, node, (), lines), lines)
    except yaml.reader.ReaderError as error:
        line, code = text.count("\n", 0, error.position) + 1, f"U+{ord(text[error.position]):04X}"
        raise YamlError(f"{line}: {code} is a character that YAML does not allow") from error
    except YamlError:
        raise
    except Exception as error:  # yaml raises many: ValueError of an escape, RecursionError of deep nesting
        mark = getattr(error, "problem_mark", None) or loader.get_mark()
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise YamlError(f"{mark.line + 1}: broken YAML: {problem}") from error


def _plain(loader: yaml.SafeLoader, node: yaml.Node, path: Where, lines: dict[Where, int]) -> Any:
    if isinstance(node, yaml.SequenceNode):
        lines.update({(*path, index): item.start_mark.line + 1 for index, item in enumerate(node.value)})
        return [_plain(loader, item, (*path, index), lines) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node)
    data: Json = {}
    for key_node, value_node in node.value:
        key = _scalar(loader, key_node) if isinstance(key_node, yaml.ScalarNode) else None
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise YamlError(f"{line}: a key must be text, got {key_node.value!r}: put it in quotes")
        if key in data:
            where = f"pair '{key}'" if path == ("pairs",) else f"key '{key}'"
            raise YamlError(f"{line}: duplicate {where} (first on line {lines[(*path, key)]})")
        lines[(*path, key)] = line
        data[key] = _plain(loader, value_node, (*path, key), lines)
    return data


def _scalar(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Return the value of a scalar. YamlError for one that its tag does not allow, or that no file name can have."""
    with suppress(Exception):  # yaml raises many: IndexError of '!!int', KeyError of '!!bool x'
        value = loader.construct_object(node)
        if not isinstance(value, str) or _NO_TEXT.search(value) is None:
            return value
    raise YamlError(f"{node.start_mark.line + 1}: broken YAML: {node.value[:40]!r} is no {node.tag.rpartition(':')[2]}")


# -- draft heads in folders -----------------------------------------------------------------------------


def head_kind(folder: str | Path) -> str | None:
    """Return the kind of the draft head in `folder`, one of HEAD_KINDS, or "mtp" for a layer that a GGUF file
    holds alone; None for anything else.

    A *speculators* head of an unknown kind counts as an EAGLE head, which its reader then refuses.
    """
    try:
        config = read_object(Path(folder) / "config.json")
    except UserError:
        return None
    if config.get("student") != FORMAT and _GLIDE not in config:
        return _kind_by_config(config) or _kind_by_weights(Path(folder))
    kind = config.get("kind", "glide" if _GLIDE in config else "plain")
    return kind if kind in HEAD_KINDS else None


def _kind_by_config(config: Json) -> str | None:
    """Return the kind of published draft head that a configuration describes; None if it describes none."""
    if "gguf" in config and config.get("kind") == "mtp":
        return "mtp"
    theirs, nested = config.get("speculators_model_type"), config.get("dflash_config")
    if theirs is not None:
        return theirs if theirs in BLOCK_KINDS else "eagle"
    if isinstance(nested, dict):
        said = {**config, **nested}
        return holding(
            {
                "domino": said.get("projector_type") == "domino",
                "dflare": "DFlare" in str(config.get("architectures")),
                "dflash2": "selector_rank" in said,
                "jetspec": said.get("causal_head") or said.get("causal"),  # the name in vLLM
                "dflash": True,
            }
        )[0]
    if "target_layer_ids" in config and "mask_token_id" in config:  # DeepSpec's
        return "dspark" if config.get("markov_rank") or config.get("enable_confidence_head") else "dflash"
    return None


def ships_mtp(folder: str | Path) -> bool:
    """Return whether `folder` has multi-token prediction layers beside a target's weights."""
    return any(_SHIPPED.search(names) for names in _weight_names(Path(folder)))


def _kind_by_weights(folder: Path) -> str | None:
    """Return the kind of published draft head in `folder`, by the names of its weights."""
    kinds = (kind for names in _weight_names(folder) for kind, name in _KIND_BY_WEIGHT.items() if name.search(names))
    return next(kinds, None)


def _weight_names(folder: Path) -> Iterator[bytes]:
    """Yield the part of each weight file, or of an index, that has the tensors' names; reads no tensor."""
    for file in (*folder.glob("*.index.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")):
        with suppress(OSError, BadZipFile, KeyError), file.open("rb") as opened:
            if file.suffix == ".json":
                yield opened.read()
            elif file.suffix == ".safetensors":
                yield opened.read(int.from_bytes(opened.read(8), "little") & 0xFFFFFFF)
            else:
                packed = ZipFile(opened)
                yield from (packed.read(name) for name in packed.namelist() if name.endswith("data.pkl"))
