"""Reads constants, types of weights, structures and functions from kernels.h, so that Python does not repeat them.

It parses the header's text, so it needs no compiler and no library, and understands only the C that the header uses.
"""

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

Structure = Any  # one of STRUCTURES: fields are numbers, addresses (integers), arrays and structures
_TEXT = re.sub(r"/\*.*?\*/", "", Path(__file__).with_name("kernels.h").read_text(encoding="utf-8"), flags=re.DOTALL)
_CTYPES: dict[str, Any] = {
    **{f"{sign}int{bits}_t": getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"float": ctypes.c_float, "double": ctypes.c_double, "void": None},
}
CONSTANTS = {  # from the header's enumerations, which count from 0 or give every value; without enum Type
    name: int(value or count)
    for body in re.findall(r"enum(?: \w+)? {([\w\s,=]+)}", _TEXT)
    for count, (name, value) in enumerate(re.findall(r"(\w+)(?: = (\d+))?", body))
}
LAYOUTS = {  # GGUF's name of each type of weights → the numbers of its row
    name: [int(number) for number in numbers.split(",")]
    for name, numbers in re.findall(r"ROW\((\w+), ([\d, ]+)\)", _TEXT)
}
FUNCTIONS = {  # name → type of the result, types of the arguments
    name: (_CTYPES[kind], [ctypes.c_void_p if "*" in part else _CTYPES[part.split()[0]] for part in parts if part])
    for kind, name, arguments in re.findall(r"^(\w+) (\w+)\((?:void|([^)]*))\);", _TEXT, flags=re.MULTILINE)
    for parts in [arguments.split(", ")]
}
STRUCTURES: dict[str, type[Structure]] = {}
_LETTERS = {ctypes.c_int64: "q", ctypes.c_uint64: "Q", ctypes.c_float: "f", ctypes.c_double: "d", ctypes.c_void_p: "P"}


def packer(name: str, first: str | None = None, last: str | None = None) -> struct.Struct:
    """Return what packs the numbers of a structure's fields, from `first` to `last` or all, as C lays them out: one
    call, where each field that is set through ctypes is one."""
    fields = STRUCTURES[name]._fields_
    names = [field for field, _ in fields]
    chosen = fields[names.index(first) if first else 0 : names.index(last) + 1 if last else None]
    return struct.Struct("@" + "".join(_LETTERS[kind] for _, kind in chosen))


for _body, _name in re.findall(r"typedef struct {([^{}]*)} (\w+);", _TEXT):
    _fields = [
        (name, ctype * int(CONSTANTS.get(count, count)) if count else ctype)  # an array where there is a count
        for kind, names in re.findall(r"(?:const )?(\w+) ([^;]+);", _body)
        for pointer, name, count in re.findall(r"([*\w ]*?)(\w+)(?:\[(\w+)\])?(?:,|$)", names)
        for ctype in [ctypes.c_void_p if "*" in pointer else _CTYPES.get(kind) or STRUCTURES[kind]]
    ]
    _inner = [name for name, _ in _fields if name == "pass"]  # its fields are also fields of the outer structure
    STRUCTURES[_name] = type(_name, (ctypes.Structure,), {"_anonymous_": _inner, "_fields_": _fields})
