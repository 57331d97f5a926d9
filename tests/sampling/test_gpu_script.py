"""The script for a first run on a GPU, tried on the CPU with tiny models."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "parts",
    [
        ["machine", "identity", "passes"],
        pytest.param(["machine", "identity", "passes", "plain", "drafted"], marks=pytest.mark.exhaustive),
    ],
)
def test_the_script_measures_every_part_and_writes_one_file(parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = [
        str(BENCHMARKS / "gpu.sh"),
        "--device",
        "cpu",
        "--small",
        "--parts",
        ",".join(parts),
        "--out",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    assert list(told) == parts
    for part in parts[1:]:
        assert told[part]["eager"]
        assert told[part]["graphs"]


def test_parts_for_which_no_time_is_left_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, parts = tmp_path / "gpu.json", "machine,passes"
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = import_module("gpu")
    monkeypatch.setattr(script, "LIMIT", -1.0)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--small", "--parts", parts, "--out", str(file)])
    assert script.main() == 1
    errors = {part: result["error"] for part, result in json.loads(file.read_text()).items()}
    assert errors == dict.fromkeys(parts.split(","), "no time was left")
