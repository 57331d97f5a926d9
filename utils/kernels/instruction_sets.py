"""Which instructions the kernels are compiled for: one table, and why there are none where no row of it fits.

Without kernels torch's own operators compute, as ever. Imports nothing heavy and compiles nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

OFF = "SPEC_KERNELS"  # set to "torch": no kernels; to a name of the table: that row, where the processor has it


@dataclass(frozen=True)
class InstructionSet:
    """A processor as the compiler must know it. Results do not depend on the row: only the speed does."""

    name: str
    machine: str
    needs: frozenset[str]  # features, as Linux calls them
    cpu: str  # the compiler's -mcpu


_WIDE = frozenset({"avx2", "fma", "f16c"})
INSTRUCTION_SETS = (  # the first that fits is taken
    InstructionSet("avx512vnni", "x86_64", _WIDE | {"avx512bw", "avx512vl", "avx512_vnni"}, "x86_64_v4+avx512vnni"),
    InstructionSet("avxvnni", "x86_64", _WIDE | {"avx_vnni"}, "x86_64_v3+avxvnni"),
    InstructionSet("avx2", "x86_64", _WIDE, "x86_64_v3"),
    InstructionSet("dotprod", "aarch64", frozenset({"asimddp"}), "generic+dotprod"),
)

_failure = ""


def failed(reason: str) -> None:
    """The kernels cannot be had in this process, for the reason said."""
    global _failure
    _failure = reason


def instruction_set() -> InstructionSet | None:
    """The table's row for this process; None: torch's own operators compute, and :func:`why_not` says why."""
    return None if why_not() else _fitting()[0]


def why_not() -> str:
    """Why there are no kernels here, in a few words; empty where there are."""
    return _failure or _unfit()


@functools.cache
def _unfit() -> str:
    if os.environ.get(OFF) == "torch":
        return f"{OFF}=torch"
    if not _fitting():
        return f"no kernels for the processor, {platform.machine() or 'unknown'} on {sys.platform}"
    return "" if importlib.util.find_spec("ziglang") else "ziglang is not installed"


@functools.cache
def _fitting() -> list[InstructionSet]:
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    wanted, have = os.environ.get(OFF), features()
    fitting = [row for row in INSTRUCTION_SETS if row.machine == machine and row.needs <= have]
    return [row for row in fitting if row.name == wanted] or fitting


def features() -> set[str]:
    """The processor's features under their Linux names, as far as the system tells them."""
    if sys.platform == "darwin":
        return {"asimddp"}  # every Apple processor of these machines
    if sys.platform == "win32":
        import ctypes

        return set(_WIDE) if ctypes.windll.kernel32.IsProcessorFeaturePresent(40) else set()  # 40: AVX2
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith(("flags", "Features")) for word in line.split(":")[-1].split()}
