"""The script for a first run on a GPU, tried on the CPU with tiny models."""

import json
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


def test_the_script_measures_every_part_and_writes_one_file(tmp_path: Path) -> None:
    file, parts = tmp_path / "gpu.json", ["machine", "identity", "passes", "plain", "drafted"]
    command = [str(SCRIPT), "--device", "cpu", "--small", "--parts", ",".join(parts), "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    assert list(told) == parts
    for part in ("identity", "passes", "plain", "drafted"):
        assert told[part]["eager"]
        assert told[part]["graphs"]
