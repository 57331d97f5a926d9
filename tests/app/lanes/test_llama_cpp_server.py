"""Drafts made here for a real server of llama-cpp-python: its own greedy text, but for near ties.

Its wheel is built from source, for minutes: where it is not installed the file is skipped.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from app.lanes.answers import run_lane
from app.lanes.pairing import choose_pair
from app.prompts.questions import conversation
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from utils.loading.loaded import LoadOptions
from utils.loading.sources import gguf_file
from utils.progress import never

pytest.importorskip("llama_cpp.server.app", reason="llama-cpp-python[server] is not installed")
pytestmark = pytest.mark.exhaustive

READY, TIE = 120.0, 0.1  # seconds; log-probabilities of passes of different widths differ by less


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the default target's file, on a free port."""
    file = gguf_file(choose_pair(ModelOptions()).target, LoadOptions())
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", str(file), "--logits_all", "true", "--n_ctx", "512", "--host", "127.0.0.1", "--port", str(port)]
    with Path(tmp_path_factory.mktemp("server"), "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "llama_cpp.server", *words], stdout=log, stderr=log, env={**os.environ}
        )
    try:
        end = time.monotonic() + READY
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def completed(url: str, prompt: str) -> str:
    """The server's own greedy text after `prompt`."""
    fields = {"prompt": prompt, "temperature": 0, "repeat_penalty": 1.0, "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=READY) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_the_text_is_the_servers_own_up_to_a_near_tie(url: str) -> None:
    settings = Settings(quiet=True, max_new_tokens=8, gamma=3)
    engine = load_engine(settings, ModelOptions(target=url, pair="smollm2", drafter="tables"), never, servers=True)
    drafted = accepted = 0
    for question in ("Name a colour.", "Count from one to five.", "Say hello hello hello."):
        prompt = conversation(engine, settings).plan(question).prompt
        own = completed(url, engine.tokenizer.decode(prompt))
        steps = list(engine.lane("spec", settings).run(prompt))
        ours = run_lane(engine.lane("spec", settings), prompt, engine.tokenizer.decode, interrupt=never)
        assert ours.text == own or min(step.top2_gap for step in steps if hasattr(step, "top2_gap")) < TIE
        drafted += ours.stats.draft_n_accepted + ours.stats.draft_n_rejected
        accepted += ours.stats.draft_n_accepted
    assert 0 < accepted < drafted
