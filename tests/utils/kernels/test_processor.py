"""Each system's answers about the processor choose the right row of the table; what nobody tells is not assumed."""

import sys
from collections.abc import Callable

import pytest

from utils.kernels.build import fitting
from utils.kernels.processor import (
    EAX,
    EBX,
    ECX,
    architecture,
    cpuid_features,
    features,
    macos_features,
    processor,
    windows_features,
)

Registers = dict[tuple[int, int, int], int]

# What processors answer: leaf, subleaf and register → value. Bits by Intel's manual, written out here once more.
BASE = {(0, 0, EAX): 0x20, (1, 0, ECX): 1 << 12 | 1 << 27 | 1 << 29}
HASWELL: Registers = {**BASE, (0, 0, EAX): 0xD, (7, 0, EBX): 1 << 5}
ICE_LAKE: Registers = {
    **BASE,
    (7, 0, EBX): 1 << 5 | 1 << 16 | 1 << 17 | 1 << 28 | 1 << 30 | 1 << 31,
    (7, 0, ECX): 1 << 11,
}
ALDER_LAKE: Registers = {**BASE, (7, 0, EAX): 2, (7, 0, EBX): 1 << 5, (7, 1, EAX): 1 << 4}
AVX, ALL = 0x7, 0xE7  # XCR0 of a system that saves the registers of AVX, and those of AVX-512 too


def cpuid(registers: Registers) -> Callable[[int, int, int], int]:
    return lambda leaf, subleaf, register: registers.get((leaf, subleaf, register), 0)


def illegal() -> int:
    raise AssertionError("XGETBV is an illegal instruction where the system does not use XSAVE")


@pytest.mark.parametrize(
    ("registers", "xcr0", "row"),
    [
        (ICE_LAKE, ALL, "avx512vnni"),
        (ICE_LAKE, AVX, "avx2"),
        (ICE_LAKE, 0xA7, "avx2"),  # a system that saves the masks and no upper registers
        (ICE_LAKE, 0x3, None),
        ({**ICE_LAKE, (7, 0, ECX): 0}, ALL, "avx2"),  # Skylake-X
        ({**ICE_LAKE, (7, 0, EBX): ICE_LAKE[7, 0, EBX] & ~(1 << 17)}, ALL, "avx2"),  # a virtual machine hides one
        (ALDER_LAKE, ALL, "avxvnni"),
        ({**ALDER_LAKE, (7, 0, EAX): 0}, ALL, "avx2"),  # no such subleaf: its bits mean nothing
        (HASWELL, AVX, "avx2"),
        ({**HASWELL, (0, 0, EAX): 6}, AVX, None),
        ({}, AVX, None),
    ],
)
def test_a_feature_counts_where_processor_and_system_have_it(registers: Registers, xcr0: int, row: str | None) -> None:
    rows = fitting("x86_64", cpuid_features(cpuid(registers), lambda: xcr0))
    assert (rows[0].name if rows else None) == row


def test_a_system_without_xsave_is_not_asked_which_registers_it_saves() -> None:
    assert not cpuid_features(cpuid({**ICE_LAKE, (1, 0, ECX): 1 << 12 | 1 << 29}), illegal)


INTEL = {f"hw.optional.{name}" for name in ("fma", "f16c", "avx2_0")}
DOT, I8MM = "hw.optional.arm.FEAT_DotProd", "hw.optional.arm.FEAT_I8MM"


@pytest.mark.parametrize(
    ("machine", "names", "row"),
    [
        ("aarch64", {DOT, I8MM}, "i8mm"),
        ("aarch64", {DOT}, "dotprod"),
        ("aarch64", set(), None),
        ("x86_64", INTEL, "avx2"),
        ("x86_64", set(), None),
    ],
)
def test_a_mac_has_what_sysctl_says(machine: str, names: set[str], row: str | None) -> None:
    rows = fitting(machine, macos_features(lambda name: int(name in names)))
    assert (rows[0].name if rows else None) == row


@pytest.mark.parametrize(
    ("machine", "numbers", "row"),
    [
        ("x86_64", {40}, "avx2"),
        ("x86_64", set(), None),
        ("aarch64", {43, 66}, "i8mm"),
        ("aarch64", {43}, "dotprod"),
        ("aarch64", {66}, None),
    ],
)
def test_windows_says_what_it_has_numbers_for(machine: str, numbers: set[int], row: str | None) -> None:
    rows = fitting(machine, windows_features(lambda number: number in numbers))
    assert (rows[0].name if rows else None) == row


@pytest.mark.skipif((sys.platform, architecture()) != ("linux", "x86_64"), reason="compares with Linux's own list")
def test_this_processor_answers_as_linux_does() -> None:
    every = cpuid_features(cpuid(dict.fromkeys([*ICE_LAKE, *ALDER_LAKE], 0xFFFFFFFF)), lambda: ALL)
    assert len(every) == 10
    assert cpuid_features(*processor()) == features() & every
