"""Which instructions the compiled kernels are written for here: one table, and who computes where no row of it fits.

numba is only a compiler here and may be missing or broken; then, and on processors and systems without a row, torch's
own operators compute as ever. Imports neither numba nor torch before it is asked, and takes half a second when it is:
ask last.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from dataclasses import dataclass

OFF = (
    "SPEC_KERNELS"  # set to "torch": nothing is compiled; to a name of the table: that row, where the processor has it
)


@dataclass(frozen=True)
class InstructionSet:
    """What a kernel must know of a processor. Results do not depend on the row: only the speed does."""

    name: str
    needs: tuple[str, ...]  # features, as LLVM calls them
    lanes: int  # 32-bit integers of a register
    rows: int  # of activations that share one reading of a weight's registers
    dot: str  # the instruction: pairs of 16-bit integers, multiplied and added into 32 bits
    quads: str  # unsigned bytes times signed ones: added four at a time, or only two, in 16 bits
    whole_quads: bool = False  # four


_WIDE = ("avx512f", "avx512bw", "avx512vl", "fma", "f16c")
_PAIRS, _OCTETS = "llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx512.pmaddubs.w.512"
INSTRUCTION_SETS = (  # the first that fits is taken
    InstructionSet("avx512vnni", (*_WIDE, "avx512vnni"), 16, 8, _PAIRS, "llvm.x86.avx512.vpdpbusd.512", True),
    InstructionSet("avx512", _WIDE, 16, 8, _PAIRS, _OCTETS),
    InstructionSet("avx2", ("avx2", "fma", "f16c"), 8, 4, "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx2.pmadd.ub.sw"),
)


@functools.cache
def instruction_set() -> InstructionSet | None:
    """The table's row for this process; None: torch's own operators compute, and :func:`why_not` says why."""
    return None if why_not() else _fitting()[0]


@functools.cache
def why_not() -> str:
    """Why nothing is compiled here, in a few words; empty where it is."""
    if os.environ.get(OFF) == "torch":
        return f"{OFF}=torch"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"no kernels for {sys.platform} on {platform.machine()}"
    try:
        import numba  # noqa: F401
    except Exception as error:  # whatever it is: with another numpy or a broken file it raises what it likes
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            return "numba is not installed"
        return f"numba cannot be imported: {' '.join(str(error).split())[:100]}"
    if not _fitting():
        return "the processor has no AVX2"
    from utils.kernels.team import openmp

    return "" if openmp() is not None else "torch runs without libgomp"


def _fitting() -> list[InstructionSet]:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    wanted = os.environ.get(OFF)
    fitting = [row for row in INSTRUCTION_SETS if all(features.get(need) for need in row.needs)]
    return [row for row in fitting if row.name == wanted] or fitting
