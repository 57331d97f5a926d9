"""`bench --check-identity` of trees: a model's trees say what plain decoding and transformers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sampling.loop
from app.bench import run_bench
from app.bench_fields import BenchArgs
from app.settings import ModelOptions, Settings
from tests.tiny import tiny_pair, write_prompts


@pytest.mark.parametrize("expand", ["cape", "dynamic"])
def test_trees_pass_the_check_and_are_really_grown(
    expand: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is off by much, so that siblings are taken."""
    pair = tiny_pair(tmp_path, noise=0.3, stop=False)
    options = ModelOptions(target=str(pair.target), drafter=str(pair.drafter), device="cpu")
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "hello there"}, {"prompt": "what is 2 + 2"}])
    verify, trees = sampling.loop.verify, []

    def noted(logits: Any, draft: Any, *rest: Any) -> Any:
        trees.append(draft.parents is not None)
        return verify(logits, draft, *rest)

    monkeypatch.setattr(sampling.loop, "verify", noted)
    settings = Settings(max_new_tokens=40, quiet=True, expand=expand, nodes=12)
    args = BenchArgs(prompts, methods=("ar", "spec"), gammas=(2, 6), check_identity=True)
    assert run_bench(settings, options, args) == 0
    assert capsys.readouterr().out == "identity: 2 prompts × 40 tokens × 3 lanes: 0 differ\n"
    assert sum(trees) > 5
