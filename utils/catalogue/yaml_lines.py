"""YAML text → plain data and the line of every key; refuses duplicate keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

_NO_TEXT = re.compile("[\\0\\ud800-\\udfff]")  # no file name can have them


class YamlError(Exception):
    """A mistake in the text, at a line (counted from 1)."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line, self.text = line, text


@dataclass
class YamlTree:
    """`data` as yaml.safe_load gives it; `lines[path]` the line on which the key at that path stands."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """The line of the deepest known key on the way to `path`; 1 if there is none."""
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), 1)


def read_yaml(text: str) -> YamlTree:
    """Parse `text`; raises YamlError for broken syntax, duplicate keys and keys that are no text."""
    tree = YamlTree()
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        (line, column), code = line_and_column(text, error.position), ord(text[error.position])
        raise YamlError(line, f"character {column} is U+{code:04X}, which YAML does not allow") from error
    try:
        node = loader.get_single_node()
        tree.data = None if node is None else _plain(loader, node, (), tree.lines, ())
    except yaml.MarkedYAMLError as error:
        raise _broken(error) from error
    except (ValueError, OverflowError) as error:  # of an escape that is no character
        raise YamlError(loader.get_mark().line + 1, f"broken YAML: {error}") from error
    except RecursionError as error:
        raise YamlError(loader.get_mark().line + 1, "broken YAML: it is nested too deeply") from error
    finally:
        loader.dispose()
    return tree


def line_and_column(text: str, at: int) -> tuple[int, int]:
    """The line and the character in it of `text[at]`, both counted from 1."""
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def _broken(error: yaml.MarkedYAMLError) -> YamlError:
    mark, context = error.problem_mark or error.context_mark, error.context_mark
    line = 1 if mark is None else mark.line + 1
    text = f"broken YAML: {error.problem}"
    if context is not None and context.line + 1 != line:
        text += f" ({error.context} that began on line {context.line + 1})"
    return YamlError(line, text)


def _plain(loader: Any, node: Any, path: Path, lines: dict[Path, int], above: tuple[int, ...]) -> Any:
    if id(node) in above:
        raise YamlError(node.start_mark.line + 1, "an alias refers to what it stands in")
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
        return [_plain(loader, item, (*path, i), lines, above) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node)
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _scalar(loader, key_node) if isinstance(key_node, yaml.ScalarNode) else None
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise YamlError(line, f"a key must be text, got {key_node.value!r}: put it in quotes")
        if key in data:
            where = f"pair '{key}'" if path == ("pairs",) else f"key '{key}'"
            raise YamlError(line, f"duplicate {where} (first on line {lines[(*path, key)]})")
        lines[(*path, key)] = line
        data[key] = _plain(loader, value_node, (*path, key), lines, above)
    return data


def _scalar(loader: Any, node: Any) -> Any:
    line, kind = node.start_mark.line + 1, node.tag.rpartition(":")[2]
    try:
        value = loader.construct_object(node)
    except yaml.YAMLError:
        raise
    except Exception as error:  # yaml raises whatever comes: IndexError of '!!int', KeyError of '!!bool x'
        raise YamlError(line, f"broken YAML: {node.value[:40]!r} is no {kind}") from error
    if isinstance(value, str) and (wrong := _NO_TEXT.search(value)) is not None:
        raise YamlError(line, f"broken YAML: {value[:40]!r} holds U+{ord(wrong[0]):04X}, which is no text")
    return value
