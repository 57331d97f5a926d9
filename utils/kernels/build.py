"""Compiles the C files of this folder into a shared library for this processor, once a machine, with `ziglang`.

:data:`INSTRUCTION_SETS` says how the kernels are compiled. Where no row fits there are no kernels, and torch's own
operators compute. The name of a kept library has a hash of the sources, the processor's row and the flags, so a stale
one is never run. Imports torch only to ask for the processor's features.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from utils.files import locked, scratch_folder

OFF = "SPEC_KERNELS"  # "torch": no kernels; a name of the table: that row, if the processor has it
FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-g0")
SOURCES = Path(__file__).parent
UNITS = {  # object: source and definition
    "products": ("products.c", "-DNARROW=0"),
    "narrow": ("products.c", "-DNARROW=1"),
    **{
        name: (f"{name}.c", "-DNDEBUG")
        for name in ("pass", "mixture", "stages", "attention", "linear", "blocks", "walk", "lookup", "team")
    },
}


@dataclass(frozen=True)
class InstructionSet:
    """A row of the table: a kind of processor. Results do not depend on the row, only the speed does."""

    name: str
    machine: str
    needs: frozenset[str]  # features by torch's names (torch.cpu.get_capabilities)
    cpu: str  # the compiler's -mcpu


_WIDE = frozenset({"avx2", "fma3", "f16c"})
_AVX512 = _WIDE | {f"avx512_{part}" for part in ("f", "cd", "dq", "bw", "vl", "vnni")}
INSTRUCTION_SETS = (  # the first that fits is taken
    InstructionSet("avx512vnni", "x86_64", _AVX512, "x86_64_v4+avx512vnni"),
    InstructionSet("avxvnni", "x86_64", _WIDE | {"avx_vnni"}, "x86_64_v3+avxvnni+fast_dpwssd"),
    InstructionSet("avx2", "x86_64", _WIDE, "x86_64_v3"),
    InstructionSet("i8mm", "aarch64", frozenset({"dot", "i8mm"}), "generic+dotprod+i8mm"),
    InstructionSet("dotprod", "aarch64", frozenset({"dot"}), "generic+dotprod"),
)
failures: list[str] = []  # why the kernels could not be loaded in this process


class BuildError(Exception):
    """The compiler's message, in one line."""


def instruction_set() -> InstructionSet | None:
    """Return the table's row for this process; None if there are no kernels, for the reason of :func:`why_not`."""
    return None if why_not() else _fitting()[0]


def why_not() -> str:
    """Return why there are no kernels, in a few words; "" if there are."""
    return failures[0] if failures else _unfit()


@functools.cache
def _unfit() -> str:
    if os.environ.get(OFF) == "torch":
        return f"{OFF}=torch"
    if not _fitting():
        return f"no kernels for the processor, {platform.machine() or 'unknown'} on {sys.platform}"
    return "" if importlib.util.find_spec("ziglang") else "ziglang is not installed"


@functools.cache
def _fitting() -> list[InstructionSet]:
    machine = platform.machine().lower()
    rows = fitting({"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine), features())
    return [row for row in rows if row.name == os.environ.get(OFF)] or rows


def features() -> set[str]:
    """Return the features that both this processor and the system support, by torch's names."""
    import torch

    return {name for name, has in torch.cpu.get_capabilities().items() if has is True}


def fitting(machine: str, known: set[str]) -> list[InstructionSet]:
    """Return the table's rows for a processor with the `known` features, the fastest first."""
    return [row for row in INSTRUCTION_SETS if row.machine == machine and row.needs <= known]


def library(
    folder: Path | None,
    row: InstructionSet,
    report: Callable[[], None] = lambda: None,
    waits: Callable[[], None] = lambda: None,
) -> ctypes.CDLL:
    """Return the library for a processor, kept in `folder`; `report` is called before it is compiled, `waits` while
    another process compiles it.

    Where `folder` is None or cannot be written to or executed from, a temporary folder serves this process. BuildError
    if the library cannot be compiled or loaded.
    """
    if folder is not None:
        kept = kept_library(folder, row)
        with suppress(OSError):  # not writable, a full disk, or a folder whose files must not be executed
            if not kept.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                with locked(kept, waits), scratch_folder(folder) as scratch:
                    if not kept.is_file():  # another process may have compiled it meanwhile
                        report()
                        os.replace(compile_library(Path(scratch) / kept.name, row.cpu), kept)
            return ctypes.CDLL(str(kept))
    report()
    try:
        # Windows deletes no library that is loaded.
        with tempfile.TemporaryDirectory(prefix="kernels-", ignore_cleanup_errors=True) as scratch:
            return ctypes.CDLL(str(compile_library(Path(scratch) / "kernels.so", row.cpu)))
    except OSError as error:
        raise BuildError(f"the kernels cannot be loaded: {error}") from error


def kept_library(folder: Path, row: InstructionSet) -> Path:
    """Return the path of the library of these sources in `folder`."""
    texts = [file.read_bytes() for file in sorted(SOURCES.glob("*.[ch]"))]
    version = hashlib.sha256(b"\0".join([*texts, repr((row.cpu, FLAGS, sys.platform)).encode()])).hexdigest()[:16]
    return folder / f"kernels-{row.name}-{version}{'.dll' if sys.platform == 'win32' else '.so'}"


def compile_library(out: Path, cpu: str, *more: str) -> Path:
    """Compile the library into the file `out` and return `out`; its folder also gets the objects. `more`: arguments for
    the compiler. BuildError if that fails."""
    cache = str(out.parent / "zig")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}

    def run_compiler(*arguments: str) -> None:
        command = [sys.executable, "-m", "ziglang", "cc", f"-mcpu={cpu}", *more, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise BuildError(f"the kernels do not compile: {(lines or ['no message'])[0].strip()[:200]}")

    def compiled(unit: str) -> str:
        (source, definition), result = UNITS[unit], str(out.parent / f"{unit}.o")
        run_compiler("-c", *FLAGS, definition, "-o", result, str(SOURCES / source))
        return result

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, UNITS))
    # On Linux the process has loaded libc already, so the compiler need not build one.
    bare = ["-nostdlib"] if sys.platform == "linux" and not more else []
    run_compiler("-shared", *bare, "-s", "-o", str(out), *objects)
    return out
