"""How memory is asked of the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

_TAKE = """
import resource, sys
import numpy as np
from utils.machine import keep_memory
if sys.argv[1] == "kept":
    keep_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    one = np.ones(5_000_000)
    two = one + one
    del one, two
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what glibc can be told")
def test_memory_that_was_freed_is_not_cleared_anew() -> None:
    """20 times 80 MB in pages, or once."""
    faults = {
        how: int(subprocess.run([sys.executable, "-c", _TAKE, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "given back")
    }
    assert faults["kept"] < faults["given back"] / 4
