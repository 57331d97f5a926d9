"""The script for a first run on a GPU, tried on the CPU with tiny models."""

import json
import subprocess
from pathlib import Path

import pytest


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
        str(Path(__file__).parents[2] / "benchmarks" / "gpu.sh"),
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
