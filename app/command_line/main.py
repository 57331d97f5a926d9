"""The command line: layers the settings, runs the sub-command, and turns errors into one line and an exit code.

0 done, 1 failed at run time or a server broke an answer off, 2 usage or configuration, 130 Ctrl-C. Answers go to
stdout, errors to stderr. Knows no models; torch is imported only after the command line has been parsed.
"""

import contextlib
import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import IO

from app.command_line.arguments import COMMANDS, Request, read_request
from app.settings.table import Layers, misspelt_variables
from utils.errors import UsageError, UserError
from utils.processes import check_command, hush, is_first_process, leave_at_once, this_process
from utils.progress import INTERRUPTED
from utils.visible import to_stderr

GRACE = 5.0  # seconds that the other processes of a run wait before they end with an error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code. Raises nothing, and leaves no stream for which the interpreter would
    print an error at its exit.

    A process of torchrun does not return: it ends here.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    verbose = "--verbose" in arguments or os.environ.get("SPEC_VERBOSE", "").lower() in ("on", "yes", "true", "1")
    errors = sys.stderr if is_first_process() else hush(verbose)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or replaced by something plainer
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    code = 0
    try:
        code = _guarded(arguments, verbose, errors)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        # Point the broken stream at nothing, so that the interpreter's last flush raises no error.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A broken pipe is no error: its reader has left. Another error may have been reported already.
        if code == 0 and not isinstance(error, BrokenPipeError):
            to_stderr(f"error: {_line(error, verbose)}")
            code = 1
    if this_process().world_size > 1:
        leave_at_once(code)
    return code


def _guarded(arguments: list[str], verbose: bool, errors: IO[str]) -> int:
    try:
        if sys.stdout is None:
            raise UserError("stdout is closed")
        request = read_request(arguments, os.environ)
        check_command(request.command)
        return _run(request)
    except SystemExit as leaving:  # --help and --version, SIGTERM and a second Ctrl-C
        return leaving.code if isinstance(leaving.code, int) else 0
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except Exception as error:
        trace = traceback.format_exc() if verbose else ""
        if not is_first_process():
            time.sleep(GRACE)  # the first process reports the error of all, and torchrun ends this one
        to_stderr(f"{trace}error: {_line(error, verbose)}", stream=errors)
        return error.exit_code if isinstance(error, UserError) else 1


def _line(error: Exception, verbose: bool) -> str:
    """Return an error in one line: the user's, the operating system's (with the file), or a fault of the program."""
    text = " ".join(str(error).split())
    lost = this_process().world_size > 1 and any(
        word in text.lower() for word in ("gloo", "nccl", "connection", "store")
    )
    match error:
        case UserError():
            return text
        case ModuleNotFoundError():
            return f"{error}: python -m pip install -r requirements.txt installs what is needed"
        case OSError(errno=int()):
            return f"cannot read or write{f' {error.filename}' if error.filename else ''}: {error.strerror}"
        case RuntimeError() if lost:
            return f"another process of this run cannot be reached any more ({text[:120]})"
    first = next((f": {line.strip()}" for line in str(error).splitlines() if line.strip()), "")
    hint = "" if verbose else " (run with --verbose for the traceback)"
    return f"internal: {type(error).__name__}{first}{hint}"


def _run(request: Request) -> int:
    to_stderr(*(f"warning: {warning}" for warning in misspelt_variables(request.environ)))
    options, layers = request.options, layers_of(request)
    # Only the first process writes files.
    settings = layers.settings if is_first_process() else layers.settings.changed(record="")
    if run := COMMANDS[request.command].run:
        module, _, name = run.partition(":")
        own = request.own if is_first_process() else Namespace(**{**vars(request.own), "out": None, "report": None})
        return int(getattr(import_module(module), name)(settings, options, own))
    if request.command == "run" or not (sys.stdin and not sys.stdin.closed and sys.stdin.isatty()):
        from app.command_line.run import run_once

        prompt = None if request.prompt == "-" else request.prompt
        if prompt is None and (sys.stdin is None or sys.stdin.closed):
            raise UsageError("no prompt: stdin is closed")
        own = request.own if request.command == "run" else Namespace(json=False, logprobs=None, samples=None)
        if own.logprobs is not None and (own.samples or not own.json):
            raise UsageError("--logprobs needs --json, and answers without --samples")
        if own.samples is not None:
            from app.command_line.run import run_samples

            return run_samples(settings, options, prompt, own.json, own.samples)
        return run_once(settings, options, prompt, own.json, own.logprobs)
    from app.console.repl import run_console

    return run_console(settings, options, layers)


def layers_of(request: Request) -> Layers:
    """Return all layers but /set. Flags are read first, so that a wrong one is reported even if the catalogue is
    wrong."""
    flags_alone = Layers.of(environ=request.environ, flags=request.flags)
    if COMMANDS[request.command].level != "all":  # such a command does not use the pair's own settings
        return flags_alone
    from app.lanes.pairing import choose_pair

    return flags_alone.resolve(choose_pair(request.options).defaults)
