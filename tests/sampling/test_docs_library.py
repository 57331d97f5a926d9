"""docs/library.md: every example runs, in order, with the default model, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import sampling

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL)


def test_every_example_prints_what_the_page_says(
    default_pair: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    untouched_global_noise: None,
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"target": default_pair.target.model, "tokenizer": default_pair.tokenizer}
    for number, (code, printed) in enumerate(BLOCKS, 1):
        exec(compile(code, f"docs/library.md, example {number}", "exec"), names)
        assert capsys.readouterr().out.rstrip("\n") == printed.rstrip("\n"), f"example {number}:\n{code}"


def test_every_example_shows_what_it_prints() -> None:
    assert len(BLOCKS) >= 12
    assert all(printed for code, printed in BLOCKS)
    assert PAGE.count("```python") == len(BLOCKS)


def test_the_page_names_every_public_call() -> None:
    exempt = {"FeatureDrafter", "GlideLM"}  # parts of Engine's GLIDE drafter and of the console
    assert [name for name in sampling.__all__ if name not in PAGE and name not in exempt] == []
