"""Models are built one at a time, whoever asks: a load that was called off may still run while the next begins."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_pair
from utils.loading import LoadOptions, load_pair
from utils.specs import PairSpec, spec_from_argument


def test_two_threads_never_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PairSpec(name="x", target=spec_from_argument(str(tiny_pair(tmp_path).target)), drafter="none")
    build, inside, most = AutoModelForCausalLM.from_pretrained, [0], [0]

    def counted(*args: Any, **named: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.2)
        try:
            return build(*args, **named)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    loaded: list[Any] = []
    threads = [threading.Thread(target=lambda: loaded.append(load_pair(spec, LoadOptions()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(loaded), most[0]) == (3, 1)
    assert not any(one.is_meta for pair in loaded for one in pair.target.model.parameters())
