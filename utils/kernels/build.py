"""The C files of this folder into a shared library, once a machine, by the compiler that `ziglang` brings.

What is kept is found by the text of the sources, the processor's row and the flags, so that nothing stale is ever run.
Where the kept folder cannot be written to or executed from, a temporary folder serves this process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from utils.kernels.instruction_sets import InstructionSet

FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-g0")
_SOURCES = Path(__file__).parent
_UNITS = {  # object: source and what is defined for it
    "products": ("products.c", "-DNARROW=0"),
    "narrow": ("products.c", "-DNARROW=1"),
    **{
        name: (f"{name}.c", "-DNDEBUG") for name in ("pass", "mixture", "attention", "linear", "blocks", "walk", "team")
    },
}


class BuildError(Exception):
    """The compiler's own words, in one line."""


def library(folder: Path | None, row: InstructionSet, report: Callable[[], None] = lambda: None) -> ctypes.CDLL:
    """The kernels for a processor, from `folder` if they are kept there; `report` is called before a compilation.

    BuildError if they cannot be compiled or loaded.
    """
    if folder is not None:
        kept = kept_library(folder, row)
        try:
            if not kept.is_file():
                _build_once(kept, row, report)
            return ctypes.CDLL(str(kept))
        except OSError:  # not writable, a full disk, or a folder whose files must not be executed
            pass
    report()
    try:
        with tempfile.TemporaryDirectory(prefix="kernels-") as place:
            built = Path(place) / "kernels.so"
            compile_library(built, row.cpu)
            return ctypes.CDLL(str(built))
    except OSError as error:
        raise BuildError(f"the kernels cannot be loaded: {error}") from error


def kept_library(folder: Path, row: InstructionSet) -> Path:
    """Where the library of these sources is kept."""
    return folder / f"kernels-{row.name}-{_version(row.cpu)}{'.dll' if sys.platform == 'win32' else '.so'}"


@functools.cache
def _version(cpu: str) -> str:
    texts = [file.read_bytes() for file in sorted(_SOURCES.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join([*texts, repr((cpu, FLAGS, sys.platform)).encode()])).hexdigest()[:16]


def _build_once(kept: Path, row: InstructionSet, report: Callable[[], None]) -> None:
    """One process at a time; the library appears whole."""
    from filelock import FileLock

    kept.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):
        if kept.is_file():
            return
        report()
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix="kernels-") as place:
            built = Path(place) / kept.name
            compile_library(built, row.cpu)
            os.replace(built, kept)


def compile_library(out: Path, cpu: str, *more: str) -> None:
    """Compile into the file `out`, in whose folder the compiler works. BuildError: it failed."""
    compiler = (sys.executable, "-m", "ziglang", "cc")
    cache = out.parent / "zig"
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}

    def called(*arguments: str) -> None:
        run = subprocess.run(
            [*compiler, *arguments], capture_output=True, text=True, errors="replace", env=environment, check=False
        )
        if run.returncode:
            lines = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
            raise BuildError(f"the kernels do not compile: {(lines or ['no message'])[0].strip()[:200]}")

    def compiled(unit: str) -> str:
        source, defined = _UNITS[unit]
        made = str(out.parent / f"{unit}.o")
        called("-c", *FLAGS, f"-mcpu={cpu}", *more, defined, "-o", made, str(_SOURCES / source))
        return made

    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(compiled, _UNITS))
    # On Linux what the kernels need of libc the process has already, so that none need be built for them.
    bare = ["-nostdlib"] if sys.platform == "linux" and not more else []
    called("-shared", f"-mcpu={cpu}", *more, *bare, "-s", "-o", str(out), *objects)
