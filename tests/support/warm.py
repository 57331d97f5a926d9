"""Python programs that start at once: forked from a process that has imported the libraries, which takes seconds.

Descriptors, signals, deaths, files and exit codes are real. What libraries read of the environment when they are
imported is that of the first start: tests of such settings, and of the start itself, take a process of their own.
"""

import fcntl
import multiprocessing
import os
import pty
import runpy
import subprocess
import sys
import termios
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from pexpect.fdpexpect import fdspawn

READY = (
    "app.lanes.lane",
    "app.command_line.run",
    "gguf",
    "prompt_toolkit",
    "rich.console",
    "utils.loading.build",
    "torch.distributed.tensor",
    "transformers.distributed.mixin",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "tests.support.students",
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([*READY])


class Warm:
    """`python WORDS` as subprocess.Popen starts it, with as much of what a Popen does as tests ask for."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        errors: str | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        mine, theirs = zip(*map(_ends, range(3), (stdin, stdout, stderr)), strict=True)
        kind: dict[str, Any] = {"mode": "r", "errors": errors, "encoding": "utf-8"} if text else {"mode": "rb"}
        self.stdout, self.stderr = (None if one is None else os.fdopen(one, **kind) for one in mine[1:])
        told = dict(os.environ if env is None else env)
        details = ([*command[1:]], told, str(cwd or Path.cwd()), theirs, start_new_session)
        self._process = CONTEXT.Process(target=_act, args=details)
        self._process.start()
        self.pid: int = self._process.pid or 0
        for one in theirs:
            one.close()

    def __enter__(self) -> "Warm":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = 180.0) -> tuple[Any, Any]:
        """What both streams hold when the process has ended: no more than a pipe does, else it never ends."""
        self.wait(timeout)
        out, err = (None if one is None else one.read() for one in (self.stdout, self.stderr))
        return out, err


class OnTerminal(fdspawn):
    """`python WORDS` in a terminal of its own, as far as tests/support/screen.py asks for what pexpect.spawn does."""

    def __init__(self, command: Sequence[str], rows: int, columns: int, env: Mapping[str, str]) -> None:
        keys, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (rows, columns))
        self.process = Warm(command, env=env, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
        self.pid, self.exitstatus, self.signalstatus = self.process.pid, None, None
        os.close(terminal)
        super().__init__(keys, encoding="utf-8", codec_errors="replace")

    def isalive(self) -> bool:
        return self.process.poll() is None

    def setwinsize(self, rows: int, columns: int) -> None:
        termios.tcsetwinsize(self.child_fd, (rows, columns))

    def close(self, force: bool = True) -> None:
        super().close()
        if force and self.isalive():
            self.process.kill()
        code = self.process.wait(20)
        self.exitstatus, self.signalstatus = (code, None) if code >= 0 else (None, -code)


def run(command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with both streams captured as text."""
    process = Warm(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.wait(), out, err)


def _ends(number: int, wanted: int | IO[Any] | None) -> tuple[int | None, Connection]:
    """Our end of stream `number`, where there is one, and a copy of the program's that can be sent to it."""
    if wanted == subprocess.PIPE:
        ours, theirs = os.pipe()
        return ours, Connection(theirs)
    if wanted == subprocess.DEVNULL:
        return None, Connection(os.open(os.devnull, os.O_RDWR))
    return None, Connection(
        os.dup(number if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno())
    )


def _act(words: list[str], env: dict[str, str], cwd: str, streams: Sequence[Connection], own: bool) -> None:
    """The program, in the forked process."""
    if own:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    if own and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    import torch

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    code: object = 1
    try:
        for folder in env.get("PYTHONPATH", "").split(os.pathsep):
            if (custom := Path(folder or "nowhere") / "sitecustomize.py").is_file():
                runpy.run_path(str(custom))
        _run(words)
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
