"""Fixtures that several test files share: the default pair, loaded once, and small random models."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as infer.py does, before torch starts its threads
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores, and so do the programs they start

import pytest
import torch

SLOWEST_FIRST = (
    "identity_real",
    "model_files",
    "cascade_exact",
    "student_exact",
    "chi_square",
    "terminal",
    "cascade_students",
    "distill",
    "shards",
    "encdec_pair",
    "prefix_exact",
    "docs_library",
    "negative_controls",
    "encdec",
    "check",
    "oneshot",
    "quantization",
    "trees",
    "beam",
    "enumeration",
    "cache_audit",
    "loading",
    "bench_journal",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files are dealt out to the processes in this order: no long one is left for the end, when others are done."""
    places = {f"test_{name}.py": place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage needs to look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _ctrl_c_again() -> Iterator[None]:
    """What leaves because of Ctrl-C ends a process; here it is the next test's turn."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def default_pair() -> Any:
    """The default pair of models.yaml in float32 on the CPU."""
    from utils.catalogue import load_catalogue
    from utils.loading import LoadOptions, load_pair

    catalogue = load_catalogue(Path(__file__).parent.parent / "models.yaml")
    return load_pair(catalogue.pairs[catalogue.default], LoadOptions(device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def reference_model(default_pair: Any) -> Any:
    """The default target as plain transformers code, nothing packed or rewritten: the oracle."""
    from transformers import LlamaForCausalLM

    loaded = default_pair.target.model
    with torch.random.fork_rng():
        twin = LlamaForCausalLM(loaded.config).float().eval()
    lacking = twin.load_state_dict(loaded.state_dict(), strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"}  # tied to the embeddings
    assert not lacking.unexpected_keys
    twin.tie_weights()
    return twin


@pytest.fixture
def untouched_global_noise() -> Iterator[None]:
    """Fails a test that draws from torch's global generator or seeds it."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())
