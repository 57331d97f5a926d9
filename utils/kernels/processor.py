"""The processor's features by their Linux names, as far as the operating system also supports them.

Linux lists them in a file. Windows tells, and the processor itself (`cpuid`, and `xgetbv` for the registers that the
system saves); macOS tells by `sysctl`, for it switches AVX-512 on for a process only when that is used. What nobody
tells is not in the set: a feature too few costs speed, one too many is an illegal instruction.
Sources: Intel's Software Developer's Manual, volume 2A, CPUID and XGETBV; `winnt.h`; `sysctl hw.optional`.
"""

import ctypes
import mmap
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

EAX, EBX, ECX = 0xC0, 0xD8, 0xC8  # how `mov eax, …` names them
_X86 = {  # leaf, subleaf, register and bit of CPUID
    "fma": (1, 0, ECX, 12),
    "f16c": (1, 0, ECX, 29),
    "avx2": (7, 0, EBX, 5),
    "avx512f": (7, 0, EBX, 16),
    "avx512dq": (7, 0, EBX, 17),
    "avx512cd": (7, 0, EBX, 28),
    "avx512bw": (7, 0, EBX, 30),
    "avx512vl": (7, 0, EBX, 31),
    "avx512_vnni": (7, 0, ECX, 11),
    "avx_vnni": (7, 1, EAX, 4),
}
_OSXSAVE = (1, 0, ECX, 27)  # the system uses XSAVE, and XGETBV is allowed
_AVX, _AVX512 = 0x06, 0xE6  # bits of XCR0: registers that the system saves
_WINDOWS = {"avx2": 40, "asimddp": 43, "i8mm": 66}  # numbers of IsProcessorFeaturePresent
_MACOS = {
    **{name: f"hw.optional.{name}" for name in _X86},
    "avx2": "hw.optional.avx2_0",
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
}


def architecture() -> str:
    """The processor's architecture by the compiler's name: `x86_64`, `aarch64`, …"""
    machine = platform.machine().lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)


def features() -> set[str]:
    """The features of this processor."""
    x86 = architecture() == "x86_64"
    if sys.platform == "darwin":
        known = macos_features(_sysctl)
        return known if x86 else known | {"asimddp"}  # every Apple processor has it; macOS 11 has no name for it
    if sys.platform == "win32":
        known = windows_features(lambda number: bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(number)))
        with suppress(OSError):
            known |= cpuid_features(*processor()) if x86 else set()
        return known
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith(("flags", "Features")) for word in line.split(":")[-1].split()}


def macos_features(sysctl: Callable[[str], int]) -> set[str]:
    """The features by `sysctl`, which returns the value of a name, 0 for an unknown one."""
    return {name for name, wanted in _MACOS.items() if sysctl(wanted)}


def windows_features(present: Callable[[int], bool]) -> set[str]:
    """The features by IsProcessorFeaturePresent. It has no numbers for FMA and F16C, which all with AVX2 have."""
    known = {name for name, number in _WINDOWS.items() if present(number)}
    return known | {"fma", "f16c"} if "avx2" in known else known


def cpuid_features(cpuid: Callable[[int, int, int], int], xcr0: Callable[[], int]) -> set[str]:
    """The features by `cpuid(leaf, subleaf, register)`, of which `xcr0()` says that the system saves the registers."""

    def has(leaf: int, subleaf: int, register: int, bit: int) -> bool:
        highest = cpuid(7, 0, EAX) if leaf == 7 else 0
        return subleaf <= highest and bool(cpuid(leaf, subleaf, register) >> bit & 1)

    if cpuid(0, 0, EAX) < 7 or not has(*_OSXSAVE):
        return set()
    saved = xcr0()
    usable = {name for name in _X86 if not (_AVX512 if name.startswith("avx512") else _AVX) & ~saved}
    return {name for name in usable if has(*_X86[name])}


def processor() -> tuple[Callable[[int, int, int], int], Callable[[], int]]:
    """CPUID and XGETBV of this x86-64 processor, as :func:`cpuid_features` takes them.

    They are machine code. OSError where the system runs none from a process's own memory.
    """
    run = _runner()

    def cpuid(leaf: int, subleaf: int, register: int) -> int:
        ask = b"\xb8" + leaf.to_bytes(4, "little") + b"\xb9" + subleaf.to_bytes(4, "little")  # mov eax, …; mov ecx, …
        return run(b"\x53" + ask + b"\x0f\xa2\x89" + bytes([register]) + b"\x5b\xc3")  # push rbx; cpuid; mov; pop; ret

    return cpuid, lambda: run(b"\x31\xc9\x0f\x01\xd0\xc3")  # xor ecx, ecx; xgetbv; ret


def _runner() -> Callable[[bytes], int]:
    """A function that runs machine code and returns the register eax."""
    page = ctypes.c_char * mmap.PAGESIZE
    if sys.platform == "win32":
        allocate = ctypes.windll.kernel32.VirtualAlloc
        allocate.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulong, ctypes.c_ulong)
        allocate.restype = ctypes.c_void_p
        address = allocate(None, mmap.PAGESIZE, 0x3000, 0x40)  # reserve and commit; execute, read and write
        if not address:
            raise OSError("no executable memory")
        memory = page.from_address(address)
    else:
        rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        memory = page.from_buffer(mmap.mmap(-1, mmap.PAGESIZE, prot=rights))
    function = ctypes.CFUNCTYPE(ctypes.c_uint32)(ctypes.addressof(memory))

    def run(code: bytes) -> int:
        ctypes.memmove(memory, code, len(code))
        return int(function())

    return run


def _sysctl(name: str) -> int:
    value, size = ctypes.c_uint64(), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value
