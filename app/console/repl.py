"""The console: read a line, do what it says, again. The pair loads behind the prompt meanwhile.

Importing this imports no torch, so the prompt takes typing at once. Knows no decoding.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from app.chat.conversation import clean
from app.console.actions import Actions
from app.console.loading import Loader, load_engine, one_line
from app.console.prompt import HungUpError, LeaveError, PromptReader, Reader
from app.console.rescue import Rescue
from app.console.slash_commands import dispatch
from app.lanes.processes import TERMINATED, broken, died, leave_at_once, tell_launcher
from app.screen.terminal import Interrupts, is_live, make_console, quiet_keys
from app.settings.layers import Layers, ModelOptions, Settings
from utils.errors import UserError
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.console.completion import Completion


MakeReader = Callable[[Actions], Reader]
HUNG_UP = 129  # as a shell tells that SIGHUP ended it


def run_console(
    settings: Settings,
    options: ModelOptions,
    layers: Layers | None = None,
    *,
    loader: Loader = load_engine,
    make_reader: MakeReader | None = None,
    out: Console | None = None,
) -> int:
    """Chat until the user leaves; the exit code.

    `layers` says where the settings come from (for /reset). Tests give their own loader, reader and
    console. Raises UsageError for a wrong catalogue or an unknown pair, before anything is shown.
    """
    from app.lanes.pairing import choose_pair

    spec = choose_pair(options)
    layers = layers or Layers(flags=settings.model_dump())
    console = out or make_console(settings)
    live = out is None and is_live(console)
    errors = console if out is not None or live else Console(stderr=True, highlight=False, markup=False)
    actions = Actions(layers, options, console, errors, loader, live)
    reader = (make_reader or prompt_reader)(actions)
    actions.refresh = reader.refresh
    actions.pairs.begin(spec)

    def leave() -> None:
        actions.leaving = True
        actions.stop.stopped = True
        reader.leave()

    unexpected: Exception | None = None
    with Rescue(actions.saved, leave) as rescue:
        try:
            with quiet_keys():  # what is typed while something is printed waits for the next prompt
                code = loop(actions, reader)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0
        except Exception as error:
            code, unexpected = 1, error
        try:
            code = ended(actions, rescue, rescue.code or code, unexpected)
        finally:
            if actions.recorder is not None:
                actions.recorder.close()
    if actions.pairs.leave() and out is None:
        leave_at_once(code)  # a thread is inside a library that cannot be called off
    return code


def ended(actions: Actions, rescue: Rescue, code: int, error: Exception | None) -> int:
    """The exit code; before it, unless the user ended the console, the conversation is saved and what happened told."""
    if code in (0, INTERRUPTED):
        return code
    rescue.save()
    if code == TERMINATED and (lost := died()):
        code, error = 1, UserError(lost)
    with contextlib.suppress(OSError):  # the terminal has gone
        line = str(rescue)
        if error is not None:
            tell_launcher("; ".join(filter(None, [f"error: {one_line(error)}", line])))  # its table comes last of all
            tell(actions, error)
        if line:
            actions.errors.print(Text(line), soft_wrap=True)
    return code


def prompt_reader(actions: Actions) -> Reader:
    """The prompt on a terminal."""
    from app.console.slash_commands import completions

    def offer(line: str) -> list[Completion]:
        try:
            return completions(line, len(line), actions)
        except UserError:
            return []

    plain = actions.settings.ascii or not (actions.out.encoding or "").lower().startswith("utf")
    color = actions.out.color_system is not None and not actions.out.no_color
    return PromptReader(
        offer,
        lambda: status(actions),
        actions.hint,
        lambda error: tell(actions, error),
        second=actions.just_stopped,
        ascii=plain,
        color=color,
    )


def status(actions: Actions) -> str:
    """The prompt's bottom line."""
    from app.screen.view import toolbar

    job, chat = actions.pairs.job, actions.chat
    used, context = (len(chat.ids), chat.context) if chat else (0, 0)
    engine = actions.pairs.engine
    last = engine.last_gamma(actions.settings) if engine is not None else None
    return toolbar(actions.pairs.name, actions.settings, job.status if job else "", used, context, last)


def loop(actions: Actions, reader: Reader) -> int:
    """Read and handle lines until the user leaves."""
    while not actions.leaving:
        default, actions.kept = actions.kept, ""
        actions.reading = True
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
            actions.reading = False
        handle(actions, line)
        if broken():
            return 1
    return 0


def handle(actions: Actions, line: str) -> None:
    """One line: a command, a message, or nothing. Whatever goes wrong is one line and the console lives on."""
    try:
        with Interrupts() as actions.stop:
            if not actions.leaving:
                _handle(actions, line)
    except Exception as error:
        tell(actions, error)


def tell(actions: Actions, error: Exception) -> None:
    """An error in one line; with --verbose its traceback, unless the user can mend it."""
    actions.fail(one_line(error))
    if actions.settings.verbose and not isinstance(error, UserError):
        actions.errors.print("".join(traceback.format_exception(error)))


def _handle(actions: Actions, line: str) -> None:
    actions.collect()
    editing, actions.editing = actions.editing, False
    text = dispatch(clean(line), actions)
    if text is not None:
        actions.editing = editing  # only the very next message takes the last one's place
        actions.send(text)
