"""The console: reads a line, handles it, and reads the next. The pair loads in the background.

Importing this imports no torch, so the prompt takes keys at once. Knows no decoding.
"""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable

from prompt_toolkit.completion import Completion
from rich.console import Console

from app.chat.conversation import clean
from app.console.chat_commands import decode, saved
from app.console.prompt import HungUpError, LeaveError, PromptReader, state_folder
from app.console.slash_commands import COMMANDS, completions, dispatch
from app.console.state import ConsoleState, Loader, load_engine, one_line
from app.lanes.pairing import choose_pair
from app.screen.terminal import Handler, Interrupts, Screen, is_live, make_console, quiet_keys
from app.screen.view import toolbar
from app.settings.table import Layers, ModelOptions, Settings
from utils.errors import UserError
from utils.files import write_text
from utils.processes import leave_at_once
from utils.progress import INTERRUPTED

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM") if hasattr(signal, name)]
GRACE_S = 5.0  # seconds in which an answer can end after a signal; a pager or a viewer does not know of it
HUNG_UP = 129  # exit code of a program that SIGHUP ended, as shells report it


def run_console(
    settings: Settings,
    options: ModelOptions,
    layers: Layers,
    *,
    loader: Loader = load_engine,
    make_reader: Callable[[ConsoleState], PromptReader] | None = None,
    out: Console | None = None,
) -> int:
    """Chat until the user leaves; return the exit code.

    `layers`: the settings by origin (for /reset). Tests give their own loader, reader and console. Raises UsageError
    for a wrong catalogue or an unknown pair, before anything is shown.
    """
    spec = choose_pair(options)
    console = out or make_console(settings)
    live = out is None and is_live(console)
    errors = console if out is not None or live else Screen(stderr=True)
    state = ConsoleState(layers, options, console, errors, loader, live)
    reader = (make_reader or prompt_reader)(state)
    state.refresh = reader.refresh
    if live:
        state.hint(welcome(settings))
    state.pairs.begin(spec)

    def leave() -> None:
        state.leaving = True
        state.stop.stopped = True
        reader.leave()

    unexpected: Exception | None = None
    with Signals(leave) as signals, contextlib.ExitStack() as last:
        last.callback(lambda: state.log.close() if state.log is not None else None)
        try:
            with quiet_keys():  # keys typed while something is printed wait for the next prompt
                code = loop(state, reader)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0
        except Exception as error:
            code, unexpected = 1, error
        code = ended(state, signals.code or code, unexpected)
    if state.pairs.leave() and out is None:
        leave_at_once(code)  # a loading thread is inside a library call that cannot be cancelled
    return code


def welcome(settings: Settings) -> str:
    """Return the two lines at the start: what the panes show, and what to do first."""
    panes = "Two panes show each answer: plainly, and with drafts."
    first = panes if settings.compare == ("ar", "spec") else f"A pane for each lane: {', '.join(settings.compare)}."
    return f"{first}\nTab: a first question. /help: the commands."


def ended(state: ConsoleState, code: int, error: Exception | None) -> int:
    """Return the exit code; unless the user ended the console, show `error`, if any, and save the conversation."""
    if code in (0, INTERRUPTED):
        return code
    line = save_chat(state)
    with contextlib.suppress(OSError):  # the terminal was closed
        if error is not None:
            tell(state, error)
        if line:
            state.errors.print(line, soft_wrap=True)
    return code


def prompt_reader(state: ConsoleState) -> PromptReader:
    """Return the reader of lines on a terminal."""

    def offer(line: str) -> list[Completion]:
        with contextlib.suppress(UserError):
            return completions(line, state)
        return []

    return PromptReader(
        offer,
        lambda: status(state),
        state.hint,
        lambda error: tell(state, error),
        is_second_interrupt=state.just_stopped,
        keep=lambda: state.settings.keep,
        ascii=state.look.ascii,
        color=state.look.color,
    )


def status(state: ConsoleState) -> str:
    """Return the prompt's bottom line."""
    pairs, chat = state.pairs, state.chat
    counts = chat is not None and not (pairs.engine is not None and pairs.engine.reads_text)
    used, context = (len(chat.ids), chat.context) if chat and counts else (0, 0)
    last = pairs.engine.mean_drafted(state.settings) if pairs.engine is not None else None
    return toolbar(pairs.name, state.settings, pairs.job.status if pairs.job else "", used, context, last)


def loop(state: ConsoleState, reader: PromptReader) -> int:
    """Read and handle lines until the user leaves; return the exit code."""
    while not state.leaving:
        default, state.next_line = state.next_line, ""
        state.reading = True
        try:
            line = reader.read(default)
        except EOFError:
            break
        except HungUpError:
            return HUNG_UP
        except LeaveError:
            return INTERRUPTED
        except KeyboardInterrupt:
            continue
        finally:
            state.reading = False
        handle(state, line)
    return 0


def handle(state: ConsoleState, line: str) -> None:
    """Handle a line: a command, a message, or nothing. Any error is shown in one line, and the console continues.

    A message without an answer goes back into the input line.
    """
    try:
        with Interrupts() as state.stop:
            if state.leaving:
                return
            state.collect()
            if text := dispatch(clean(line), state, COMMANDS):
                with state.sending(text):
                    decode(state, state.conversation().plan(text))
    except Exception as error:
        tell(state, error)


def tell(state: ConsoleState, error: Exception) -> None:
    """Show an error in one line; with --verbose also its traceback, unless it is a UserError."""
    state.fail(one_line(error))
    if state.settings.verbose and not isinstance(error, UserError):
        state.errors.print("".join(traceback.format_exception(error)))


# -- a console that must end saves the conversation first -----------------------------------------


class Signals:
    """A context in which TERM, HUP and QUIT end the console properly: they call `leave()`, and `code` is 128 + their
    number. What still runs after GRACE_S ends by a SystemExit.

    Further signals change nothing. Signals ignored at the start (nohup) stay ignored.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self.code = 0  # the exit code, of the first signal
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> "Signals":
        with contextlib.suppress(ValueError):  # no signals outside the main thread
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():  # after one signal, another must not change the exit code
            signal.signal(number, signal.SIG_IGN if self.code else before)

    def _on_signal(self, number: int, _: object) -> None:
        if not self.code:
            self.code = 128 + number
            self._leave()
            if hasattr(signal, "setitimer"):
                signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        elif number == getattr(signal, "SIGALRM", None):
            raise SystemExit(self.code)


def save_chat(state: ConsoleState) -> str:
    """Save the conversation, if there is one and `keep` is on, in the state folder; return a line that names the file
    or the problem, "" if nothing is to be saved."""
    if state.chat is None or not state.chat.turns or not state.settings.keep:
        return ""
    folder = state_folder() / "chats"
    file = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(file, saved(state))
    except Exception as error:
        return f"error: the conversation could not be saved: {error}"
    return f"the conversation was saved, continue with: /load {file}"
