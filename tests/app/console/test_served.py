"""The console in a terminal with `transformers serve` as its target: turns, a race, Ctrl-C, a server that dies."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from app.lanes.pairing import choose_pair
from app.settings.table import ModelOptions
from tests.support.screen import Terminal
from utils.loading.loaded import LoadOptions
from utils.loading.sources import model_folder

pytest.importorskip("fastapi", reason="the `serving` extra of transformers is not installed")

READY, ANSWER = 240.0, 240.0  # seconds on a busy machine
LONG = "Write a long story about a river and a boat."  # greedily more than 300 tokens
SERVE = "from transformers.cli.transformers import main; main()"

pytestmark = pytest.mark.exhaustive  # two servers of transformers start


class Served:
    """`transformers serve FOLDER` on a free port."""

    def __init__(self, folder: Path, home: Path) -> None:
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with (home / f"{self.port}.log").open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", SERVE, *words], env=env, stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + READY
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return
            time.sleep(0.2)
        raise AssertionError(f"the server ended with {self.process.poll()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(folder: Path, home: Path) -> Iterator[Served]:
    server = Served(folder, home)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    """Two of the default model, as a folder of safetensors."""
    folder = model_folder(choose_pair(ModelOptions()).target, LoadOptions())
    home = tmp_path_factory.mktemp("home")
    with ExitStack() as stack:
        found = [stack.enter_context(serving(folder, home)) for _ in range(2)]
        for server in found:
            server.wait()
        yield found


@pytest.fixture(scope="module")
def chat(servers: list[Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    environ = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")), "SPEC_MAX_NEW_TOKENS": "8"}
    terminal = Terminal("--target", servers[0].url, environ=environ)
    yield terminal
    terminal.child.close(force=True)


def answered(terminal: Terminal, text: str) -> str:
    """Send a message; what the screen shows when the prompt is back."""
    before = terminal.raw.count("TTFT")
    terminal.enter(text, until=lambda: terminal.at_prompt and terminal.raw.count("TTFT") > before, seconds=ANSWER)
    terminal.quiet(0.2)
    return terminal.text


def streaming(terminal: Terminal, text: str) -> None:
    """Send a message that has a long answer to a new chat, and wait until some of it is there."""
    before = terminal.mark()
    terminal.enter("/clear", until=lambda: terminal.at_prompt and "conversation cleared" in terminal.raw[before:])
    terminal.enter(text)
    begun = re.compile(r"server (running, )?([5-9]|\d\d) pieces")
    terminal.wait(lambda: text in terminal.text and begun.search(terminal.text.rpartition(text)[2]) is not None, ANSWER)


def test_three_turns_with_a_server(chat: Terminal) -> None:
    chat.wait(lambda: chat.at_prompt, READY)
    for number, message in enumerate(("Name a colour.", "And another?", "Thanks."), start=1):
        assert "tok/s" in answered(chat, message), number
    assert "error" not in chat.text


def test_two_servers_race(chat: Terminal, servers: list[Served]) -> None:
    chat.enter(f"/compare server,{servers[1].url}", until=f"compare = server,{servers[1].url}")
    screen = answered(chat, "Name a river.")
    assert "same output" in screen
    assert f"127.0.0.1:{servers[1].port}" in screen


def test_ctrl_c_in_mid_answer_keeps_what_came(chat: Terminal) -> None:
    chat.enter("/compare server", until="compare = server")
    chat.enter("/length 300", until="max_new_tokens = 300")
    streaming(chat, LONG)
    chat.interrupt()
    chat.wait("stopped at ", 30)
    chat.wait(lambda: chat.at_prompt)


def test_a_server_that_is_killed_in_mid_answer_is_one_line_and_the_chat_goes_on(
    chat: Terminal, servers: list[Served]
) -> None:
    dead, other = servers
    time.sleep(2.1)  # a Ctrl-C soon after another one leaves
    streaming(chat, LONG)
    dead.kill()
    chat.wait(f"127.0.0.1:{dead.port} closed the connection", 30)
    chat.wait(lambda: chat.at_prompt)
    chat.enter("Hello?", until=f"no server answers at 127.0.0.1:{dead.port}", seconds=30)
    chat.wait(lambda: chat.at_prompt)
    chat.type("\x15")  # the message is back in the input line
    chat.enter(f"/compare {other.url}", until=f"compare = {other.url}")
    chat.enter("/length 8", until="max_new_tokens = 8")
    assert "tok/s" in answered(chat, "Are you there?")
    chat.enter("/history", until="Are you there?")
    assert all(text in chat.text + chat.raw for text in ("Name a colour.", LONG))
