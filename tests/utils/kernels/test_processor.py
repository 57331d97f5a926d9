"""What torch says of the processor chooses the right row of the table; what it does not say is not assumed."""

import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from utils.kernels.build import features, fitting

HASWELL = {"avx", "avx2", "fma3", "f16c"}
SKYLAKE_X = HASWELL | {f"avx512_{part}" for part in ("f", "cd", "dq", "bw", "vl")}
ICE_LAKE = SKYLAKE_X | {"avx512_vnni"}


@pytest.mark.parametrize(
    ("machine", "known", "row"),
    [
        ("x86_64", ICE_LAKE, "avx512vnni"),
        ("x86_64", SKYLAKE_X, "avx2"),
        ("x86_64", ICE_LAKE - {"avx512_dq"}, "avx2"),  # a virtual machine hides one
        ("x86_64", HASWELL | {"avx_vnni"}, "avxvnni"),
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", HASWELL - {"f16c"}, None),
        ("aarch64", {"neon", "dot", "i8mm"}, "i8mm"),
        ("aarch64", {"neon", "dot"}, "dotprod"),
        ("aarch64", {"neon", "i8mm"}, None),
    ],
)
def test_the_fastest_row_is_taken_all_of_whose_features_are_there(
    machine: str, known: set[str], row: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {
        **dict.fromkeys(ICE_LAKE | {"avx_vnni", "dot", "i8mm"}, False),
        **dict.fromkeys(known, True),
    }
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**told, "num_sockets": 1, "cpu_name": "planted"})
    rows = fitting(machine, features())
    assert (rows[0].name if rows else None) == row


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="compares with Linux's own list of x86-64"
)
def test_torch_says_of_this_processor_what_linux_says() -> None:
    flags = re.search(r"^flags.*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert flags is not None
    listed = {re.sub("^avx512(?=[a-z])", "avx512_", name) for name in flags[1].replace("fma ", "fma3 ").split()}
    every = ICE_LAKE | {"avx_vnni"}
    assert features() & every == listed & every
