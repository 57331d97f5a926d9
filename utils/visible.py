"""Escapes answers, errors, names and titles before they reach a terminal or a text file.

Control characters and direction marks are shown, so that the terminal does not obey them. A pipe and JSON get the text
as it is. Knows no screen.
"""

import sys
from contextlib import suppress
from functools import cache
from typing import IO

_CONTROLS = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)]
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_UNSEEN = [
    *(0x00AD, 0x180E, 0x200B, 0xFEFF),
    *(*range(0x2060, 0x2066), *range(0x206A, 0x2070)),  # invisible operators, deprecated formats
    *range(0xFFF9, 0xFFFC),
    *range(0xE0000, 0xE0080),  # tags
]


@cache
def _table(ascii_only: bool) -> dict[int, str]:
    """Return the replacements of the characters that a terminal would obey, or that are not seen."""
    table = {code: f"\\x{code:02x}" for code in _CONTROLS} | {code: f"\\u{code:04x}" for code in _DIRECTIONS}
    table |= dict.fromkeys(_UNSEEN, "") | dict.fromkeys((0xA0, 0x2028, 0x2029), " ")
    table |= dict.fromkeys(range(0xD800, 0xE000), "?" if ascii_only else "\ufffd")  # surrogates
    return table | {
        code: f"^{chr(code ^ 0x40)}" if ascii_only else chr(0x2421 if code == 0x7F else 0x2400 + code)
        for code in (*range(0x09), *range(0x0B, 0x20), 0x7F)
    }


def visible(text: str, ascii_only: bool = False) -> str:
    """Return `text` without anything that a terminal would obey: only line breaks and tabs are left.

    Controls become symbols (␛, or ^[ with `ascii_only`), C1 controls \\x9b, marks of direction \\u202e; other unseen
    characters are dropped. The joiners of words and emoji (ZWJ, ZWNJ) pass.
    """
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").removesuffix("\r")
    return text.translate(_table(ascii_only))


def to_stderr(*lines: str, stream: IO[str] | None = None) -> None:
    """Write lines to standard error, or to the stream in its place, unless that is closed."""
    with suppress(AttributeError, OSError, ValueError):
        (stream or sys.stderr).write("".join(f"{visible(line)}\n" for line in lines))
        (stream or sys.stderr).flush()
