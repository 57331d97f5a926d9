"""The command line: grammar, errors, exit codes, and what it hands to whom."""

import io
import os
import re
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.command_line.arguments import COMMANDS, OWN_FIELDS, build_parser, read_request
from app.command_line.main import main
from app.screen.output import screen
from app.settings.table import FIELDS, Layers, ModelOptions, Settings
from app.settings.types import LANES
from utils.errors import UsageError, UserError

ROOT = Path(__file__).resolve().parents[3]
CATALOGUE = """
default: small
defaults: {gamma: 6, top_k: 11}
pairs:
  small: {target: org/small, defaults: {top_k: 22, min_p: 0.2}}
  other: {target: org/other, drafter: org/tiny, defaults: {gamma: 7}}
"""


class Handed:
    """Stands in for the modules that the command line hands over to, and keeps what they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.does: Any = lambda: 0

    def function(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> int:
            self.calls.append((name, (*args, *more.values())))
            return int(self.does())

        return call


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Handed:
    hand = Handed()
    places = {
        "app.console.repl": ["run_console"],
        "app.command_line.run": ["run_once"],
        "app.bench.run": ["run_bench"],
        "app.measure.check": ["list_pairs", "check_pair"],
    }
    for module, names in places.items():
        room, _, leaf = module.rpartition(".")
        stub = types.ModuleType(module)
        for name in names:
            setattr(stub, name, hand.function(name))
        monkeypatch.setitem(sys.modules, module, stub)
        if hasattr(sys.modules.get(room), leaf):
            monkeypatch.setattr(module, stub)
    for name in [name for name in os.environ if name.startswith("SPEC_")]:
        monkeypatch.delenv(name)
    models = tmp_path / "models.yaml"
    models.write_text(CATALOGUE)
    monkeypatch.setenv("SPEC_MODELS", str(models))
    monkeypatch.setattr("sys.stdin", terminal())
    return hand


def terminal() -> io.StringIO:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    return stream


def test_without_words_it_opens_the_console(handed: Handed) -> None:
    assert main(["--gamma", "8"]) == 0
    [(name, (settings, options, layers))] = handed.calls
    assert name == "run_console"
    assert (settings.gamma, settings.top_k, settings.min_p) == (8, 22, 0.2)
    assert isinstance(options, ModelOptions)
    assert isinstance(layers, Layers)
    assert layers.settings == settings
    assert main(["chat", "--gamma", "8"]) == 0
    assert handed.calls[1][1][0] == settings


@pytest.mark.parametrize("argv", [[], ["chat"], ["run"], ["run", "-"]])
def test_without_a_terminal_the_pipe_is_one_prompt(
    handed: Handed, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(argv) == 0
    [(name, (_, _, prompt, as_json, logprobs))] = handed.calls
    assert (name, prompt, as_json, logprobs) == ("run_once", None, False, None)


@pytest.mark.parametrize(
    ("argv", "prompt", "as_json"),
    [
        (["run", "hello"], "hello", False),
        (["run", "hello", "world"], "hello world", False),
        (["run", "--json", "hello", "--gamma", "2"], "hello", True),
        (["run", "hello", "--json", "world"], "hello world", True),
        (["run", "--", "-1 + 2?"], "-1 + 2?", False),
        (["run", "/gamma is what?"], "/gamma is what?", False),
        (["run", ""], "", False),
    ],
)
def test_run_takes_its_prompt_from_the_words(handed: Handed, argv: list[str], prompt: str, as_json: bool) -> None:
    assert main(argv) == 0
    [(name, call)] = handed.calls
    assert (name, *call[2:]) == ("run_once", prompt, as_json, None)


def test_two_dashes_end_the_flags(handed: Handed, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--gamma", "3", "what", "--", "--foo", "--", "-x"]) == 0
    assert handed.calls[-1][1][2] == "what --foo -- -x"
    assert read_request(["replay", "--", "--odd.jsonl"], {}).own.file == Path("--odd.jsonl")
    assert main(["replay", "a.jsonl", "--", "--b"]) == 2
    assert main(["pairs", "--", "x"]) == 2
    assert "takes no further argument '--b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--gamma", "0"], "error: --gamma must be a whole number from 1 to 64 or auto, got 0"),
        (["--gamma", "Auto"], "error: --gamma must be a whole number from 1 to 64 or auto, got 'Auto'"),
        (["--top-p", "1.5"], "error: --top-p must be above 0 and at most 1, got 1.5"),
        (["--temperature", "-1"], "error: --temperature must be from 0 to 5, got -1"),
        (
            ["--stop", '["",""]'],
            """error: --stop must be a text, or several as a JSON list: ["a","b"], got '["",""]'""",
        ),
        (["--temperature=nan"], "error: --temperature must be a number from 0 to 5, got 'nan'"),
        (["--gamma"], "error: --gamma needs a value: a whole number from 1 to 64 or auto"),
        (["--no-chat=x"], "error: --no-chat takes no value, got 'x'"),
        (["--gama", "3"], "error: unknown flag --gama (did you mean --gamma?)"),
        (["--length", "3"], "error: unknown flag --length (did you mean --max-new-tokens?)"),
        (["--max-new", "3"], "error: unknown flag --max-new (did you mean --max-new-tokens?)"),
        (["--xyzzy"], "error: unknown flag --xyzzy (--help all lists them; -- ends the flags)"),
        (["--json"], "error: chat takes no --json (run, check do)"),
        (["plan", "--c", "0.1"], "error: plan is no sub-command: use check --plan"),
        (["latency"], "error: latency is no sub-command: use benchmarks/latency.py"),
        (["write", "a.jsonl"], "error: write is no sub-command: use distill --stage text"),
        (["tables", "--from", "self"], "error: tables is no sub-command: use distill --stage tables --data FILES"),
        (["report", "b.json"], "error: report is no sub-command: use bench --from FILE --report PAGE"),
        (["selftest"], "error: selftest is no sub-command: use python -m pytest -m device --device cuda"),
        (["bench", "--against", "llama.cpp"], "error: --against is no flag: use benchmarks/against.py"),
        (["rnu", "hi"], "error: unknown sub-command 'rnu' (did you mean run?); one answer: python infer.py run PROMPT"),
        (
            ["What is a river?"],
            "error: unknown sub-command 'What is a river?': have chat, run, bench, record, simulate, "
            "distill, replay, demo, pairs, check; one answer: python infer.py run PROMPT",
        ),
        (["--gamma", "4", "run", "hi"], "error: the sub-command comes first: python infer.py run …"),
        (["chat", "hi"], "error: chat takes no argument 'hi' (one answer: python infer.py run PROMPT)"),
        (["check", "a", "b", "c"], "error: check takes no further argument 'c'"),
        (["check", "a", "b", "--drafter", "c"], "error: check a b and --drafter c contradict each other: give one"),
        (["check", "small", "--pair", "other"], "error: check small and --pair other contradict each other: give one"),
        (["pairs", "--gamma", "4"], "error: pairs takes no --gamma (chat, run, bench, record, demo do)"),
        (["--load-in-8bit"], "error: --load-in-8bit is no flag: use --quantization int8"),
        (["--device", "gpu"], "error: --device must be auto, cpu, mps, cuda or cuda:N, got 'gpu'"),
        (["--device", "cuda:00"], "error: --device must be auto, cpu, mps, cuda or cuda:N, got 'cuda:00'"),
        (["--pair", ""], "error: --pair must be the name of a pair, got ''"),
        (
            ["bench", "--gammas", "1,0"],
            "error: --gammas must be a comma list of whole numbers from 1 to 64 or auto, each once, got '1,0'",
        ),
        (
            ["bench", "--methods", "arr"],
            f"error: --methods must be a comma list of {', '.join(LANES)}, server, URL, each once, got 'arr'",
        ),
        (["bench", "--repeat", "0"], "error: --repeat must be a whole number from 1 to 1000, got 0"),
        (["bench", "--limit", "0"], "error: --limit must be a whole number, 1 or more, got 0"),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_a_usage_error_is_one_line_and_exit_2(
    handed: Handed, capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", line + "\n")
    assert handed.calls == []


def raising(error: BaseException) -> Any:
    def act() -> int:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no space for the model"), 1, "error: no space for the model\n"),
        (UserError("two\nlines"), 1, "error: two lines\n"),
        (UsageError("bad"), 2, "error: bad\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
        (SystemExit(1), 1, ""),
        (
            ModuleNotFoundError("No module named 'rich'"),
            1,
            "error: No module named 'rich': python -m pip install -r requirements.txt installs what is needed\n",
        ),
        (
            PermissionError(13, "Permission denied", "x.json"),
            1,
            "error: cannot read or write x.json: Permission denied\n",
        ),
        (
            ZeroDivisionError("division\nby zero"),
            1,
            "error: internal: ZeroDivisionError: division (run with --verbose for the traceback)\n",
        ),
        (AssertionError(), 1, "error: internal: AssertionError (run with --verbose for the traceback)\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_goes_wrong_is_a_code_and_one_line(
    handed: Handed,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    handed.does = raising(error)
    assert main([]) == code
    assert capsys.readouterr().err == line


def test_verbose_shows_the_traceback_and_still_ends_with_the_line(
    handed: Handed, capsys: pytest.CaptureFixture[str]
) -> None:
    handed.does = raising(ZeroDivisionError("division by zero"))
    assert main(["--verbose"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert err.endswith("\nerror: internal: ZeroDivisionError: division by zero\n")


# ---- colour


class Stream(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@pytest.mark.parametrize(
    ("color", "tty", "environ", "wanted"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", False, {"FORCE_COLOR": "1"}, True),
        ("auto", False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_follows_flag_then_environment_then_terminal(
    color: str, tty: bool, environ: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **environ}.items():
        monkeypatch.setenv(name, value)
    console = screen(Settings(color=color), Stream(tty))
    assert (console.color_system is not None and not console.no_color) is wanted


# ---- help


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_fits_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, build_parser(command).format_help().splitlines())) <= 80


def infer(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *more.pop("python", ()), str(ROOT / "infer.py"), *words]
    return subprocess.run(command, text=True, capture_output=True, check=False, timeout=60, **more)


def test_help_comes_fast_on_stdout_and_imports_no_torch() -> None:
    infer("--help")  # warm the file cache
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    plain = infer("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: a busy machine makes everything slower.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout.startswith("usage: python infer.py [chat] [options]\n")
    assert seconds < 1
    traced = infer("--help", python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in traced.stderr.splitlines()}
    assert {"argparse", "app"} <= imported  # the trace is there at all
    assert not {"torch", "transformers", "numpy", "rich", "prompt_toolkit"} & imported


@pytest.mark.parametrize("words", [["pairs"], ["replay", "docs/examples/session.jsonl"]])
def test_a_reader_that_leaves_early_hears_nothing(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "infer.py"), *words], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(writer)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_full_disk_is_told_once_also_when_it_shows_late(unbuffered: str) -> None:
    words, environ = f"{sys.executable} {ROOT / 'infer.py'} pairs > /dev/full", {"PYTHONUNBUFFERED": unbuffered}
    process = subprocess.run(
        ["sh", "-c", words], env=os.environ | environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 1
    assert process.stderr == "error: cannot read or write: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [("pairs >&-", 1, "error: stdout is closed\n"), ("run <&-", 2, "error: no prompt: stdin is closed\n")],
)
def test_a_closed_stdout_or_stdin_is_one_line(words: str, code: int, line: str) -> None:
    command = f"{sys.executable} {ROOT / 'infer.py'} {words}"
    process = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (process.returncode, process.stderr) == (code, line)


def test_a_closed_stderr_keeps_nothing_back() -> None:
    command = f"SPEC_TEMPERATUR=1 {sys.executable} {ROOT / 'infer.py'} pairs 2>&-"
    process = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert process.returncode == 0
    assert process.stdout


def test_ctrl_c_anywhere_is_130_without_a_traceback(tmp_path: Path) -> None:
    """Interrupted while it waits for its catalogue, here a pipe that nobody writes to."""
    fifo = tmp_path / "models.yaml"
    os.mkfifo(fifo)
    command = [sys.executable, str(ROOT / "infer.py"), "run", "hi", "--models", str(fifo)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    used, now = -1.0, 0.0
    while used < now:  # until it computes no more: what is imported before may take any time
        time.sleep(1.5)
        used, now = now, sum(psutil.Process(process.pid).cpu_times()[:2])
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


# ---- which pair the options mean


def chosen(tmp_path: Path, name: str | None = None, **options: str) -> tuple[str, str, str]:
    """Pair, target's source and drafter's name that `choose_pair` makes of the options."""
    from app.lanes.pairing import choose_pair

    models = tmp_path / "models.yaml"
    models.write_text(CATALOGUE)
    pair = choose_pair(ModelOptions(models=str(models), **options), name)
    return pair.name, pair.target.source, pair.drafter_name


@pytest.mark.parametrize(
    ("options", "pair"),
    [
        ({}, ("small", "org/small", "ngram")),
        ({"pair": "other"}, ("other", "org/other", "tiny")),
        ({"pair": "other", "drafter": "none"}, ("other", "org/other", "none")),
        ({"drafter": "org/mine"}, ("small", "org/small", "mine")),
        ({"pair": "other", "target": "org/big"}, ("other", "org/big", "tiny")),
        ({"target": "org/big"}, ("big", "org/big", "ngram")),
        ({"target": "org/big", "drafter": "org/mine"}, ("big", "org/big", "mine")),
    ],
)
def test_target_and_drafter_go_in_the_places_of_the_pairs(
    options: dict[str, str], pair: tuple[str, str, str], tmp_path: Path
) -> None:
    assert chosen(tmp_path, **options) == pair


@pytest.mark.parametrize("command", COMMANDS)
def test_rare_flags_stand_under_help_all(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pages = []
    for words in (["--help"], ["-h"], ["--help", "all"]):
        assert main([command, *words]) == 0
        pages.append(capsys.readouterr().out)
    everyday, same, every = (set(re.findall(r"^  (--[a-z-]+)", page, re.MULTILINE)) for page in pages)
    rare = {known.flag for known in FIELDS.values() if known.rare and COMMANDS[command].takes(known)}
    own = {known.flag for known in OWN_FIELDS.get(command, {}).values()}
    assert everyday == same
    assert (every - everyday, every & own) == (rare - own, own)
    assert max(len(line) for page in pages for line in page.splitlines()) <= 80
