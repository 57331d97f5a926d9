"""Fixtures that several test files share: the default pair, loaded once, and small random models."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the programs that tests start compile each file once
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as infer.py does, before torch starts its threads
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores, and so do the programs they start

import pytest
import torch

# A shell that starts the tests in the background has both ignored, and so would the programs that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

SLOW = (  # 6 seconds or more on a slow machine (--junitxml), the longest first; three for their exhaustive tests
    "utils/kernels/test_driver.py",
    "sampling/models/test_architectures.py",
    "sampling/test_identity_real.py",
    "app/distill/test_distill.py",
    "sampling/drafters/test_cascade_students.py",
    "app/console/test_survival.py",
    "app/console/test_terminal.py",
    "sampling/drafters/draft_heads/test_exact.py",
    "sampling/drafters/test_vocabularies.py",
    "sampling/verify/test_prefix_exact.py",
    "app/lanes/test_draft_heads.py",
    "sampling/verify/test_trees.py",
    "sampling/test_pretend_device.py",
    "utils/test_processes.py",
    "utils/loading/test_model_files.py",
    "sampling/verify/test_negative_controls.py",
    "sampling/test_seeds.py",
    "sampling/drafters/test_cascade_exact.py",
    "utils/remote/test_server.py",
    "sampling/drafters/draft_heads/test_mtp.py",
    "sampling/models/test_fused.py",
    "sampling/drafters/draft_heads/test_blocks.py",
    "app/console/test_habits.py",
    "sampling/test_devices.py",
    "sampling/verify/test_chi_square.py",
    "app/console/test_by_accident.py",
    "app/lanes/test_lanes.py",
    "utils/kernels/test_build.py",
    "app/console/test_repl.py",
    "sampling/test_docs_library.py",
    "app/console/test_demo.py",
    "sampling/models/test_recurrent.py",
    "app/measure/test_elsewhere.py",
    "app/console/test_inspecting.py",
    "sampling/drafters/draft_heads/test_published.py",
    "sampling/models/test_encoder_decoder.py",
    "utils/gguf/test_facts.py",
    "sampling/models/test_cache_audit.py",
    "sampling/gamma/test_regret.py",
    "utils/loading/test_package_parts.py",
    "app/lanes/test_encoder_decoder.py",
    "utils/loading/test_packed_gguf.py",
    "app/lanes/test_remote_drafts.py",
    "sampling/models/test_translated.py",
    "app/lanes/test_cascade_lanes.py",
    "sampling/drafters/draft_heads/test_head_completeness.py",
    "app/replay/test_replay.py",
    "sampling/test_batches.py",
    "app/distill/test_stages.py",
    "utils/loading/test_folders.py",
    "sampling/verify/test_rules.py",
    "sampling/drafters/draft_heads/test_assistant.py",
    "app/command_line/test_main.py",
    "sampling/models/test_probe.py",
    "utils/loading/test_quantization.py",
    "utils/test_tokenizer.py",
    "sampling/verify/test_enumeration.py",
    "sampling/drafters/draft_heads/test_eagle_tree.py",
    "app/simulate/test_simulate.py",
    "sampling/models/test_trees.py",
    "app/lanes/test_spread.py",
    "app/bench/test_run.py",
    "app/chat/test_page.py",
    "sampling/test_gpu_script.py",
    "sampling/test_beam.py",
    "sampling/drafters/draft_heads/test_eagle.py",
    "sampling/gamma/test_disturbances.py",
    "app/command_line/test_servers.py",
    "app/test_foreign_text.py",
    "training/text/test_synthesize.py",
    "sampling/gamma/test_controller.py",
    "sampling/drafters/test_cascade.py",
    "app/console/test_said_before.py",
    "app/console/test_escapes.py",
    "app/lanes/test_warm.py",
    "sampling/drafters/draft_heads/test_network.py",
    "sampling/test_engine.py",
    "app/command_line/test_outputs.py",
    "utils/catalogue/test_catalogue.py",
    "utils/loading/test_completeness.py",
    "sampling/drafters/tables/test_lookup_exact.py",
    "app/console/test_figures.py",
    "sampling/test_loop.py",
    "app/bench/test_report.py",
    "sampling/test_constraint.py",
    "sampling/drafters/tables/test_lookup.py",
    "app/command_line/test_start.py",
    "app/bench/test_journal.py",
    "sampling/drafters/draft_heads/test_gguf_heads.py",
    "app/console/test_served.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests marked `device` run")
    parser.addoption("--speeds", action="store_true", help="tests marked `device` measure, and say so at the end")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The speeds that tests noted, if there are any."""
    reports = terminalreporter.getreports("passed")
    lines = [text for report in reports for name, text in report.user_properties if name == "speed"]
    if lines and terminalreporter.config.getoption("--speeds"):
        terminalreporter.section("speeds")
        terminalreporter.write("".join(f"{line}\n" for line in lines))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow files, and deal them out in this order: no long one is left for the end, when others are done."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.path in places or item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage needs to look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # batches of thousands of rows are lists by the million, and few of them cycles


@pytest.fixture(autouse=True)
def own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the width of the terminal that started pytest, or that a library has put into the environment."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the program, for this test alone."""
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _signals_again() -> Iterator[None]:
    """What leaves because of a signal ends a process; here it is the next test's turn."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def default_pair() -> Any:
    """The default pair of models.yaml in float32 on the CPU."""
    from app.lanes.pairing import catalogue_in
    from utils.loading.loaded import LoadOptions
    from utils.loading.loading import load_pair

    catalogue = catalogue_in(Path(__file__).parent.parent / "models.yaml")
    return load_pair(catalogue.pairs[catalogue.default], LoadOptions(device="cpu", dtype="float32"))


@pytest.fixture(scope="session")
def reference_model(default_pair: Any) -> Any:
    """The default target as plain transformers code, nothing packed or rewritten: the oracle."""
    from transformers import LlamaForCausalLM
    from transformers.initialization import no_init_weights

    loaded = default_pair.target.model
    with no_init_weights():
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The one number that what is timed reads as the time, in seconds."""
    now = [0.0]
    monkeypatch.setattr("utils.timing.time.perf_counter", lambda: now[0])
    return now
