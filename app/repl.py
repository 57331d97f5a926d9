"""The console: read a line, do what it says, again. The pair loads behind the prompt meanwhile.

Importing this imports no torch, so the prompt takes typing at once. Knows no decoding.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console

from app.actions import Actions
from app.commands import dispatch
from app.conversation import clean
from app.keys import LeaveError
from app.pairs import Loader, load_engine, one_line
from app.ranks import broken, leave_at_once
from app.reader import PromptReader, Reader
from app.settings import Layers, ModelOptions, Settings
from app.terminal import Interrupts, quiet_keys
from utils.errors import UserError
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.commands import Completion

MakeReader = Callable[[Actions], Reader]


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
    from app.pairing import choose_pair

    spec = choose_pair(options)
    layers = layers or Layers(flags=settings.model_dump())
    console = out or make_console(settings)
    live = out is None and is_live(console)
    errors = console if out is not None or live else Console(stderr=True, highlight=False, markup=False)
    actions = Actions(layers, options, console, errors, loader, live)
    reader = (make_reader or prompt_reader)(actions)
    actions.refresh = reader.refresh
    actions.pairs.begin(spec)
    try:
        with quiet_keys():  # what is typed while something is printed waits for the next prompt
            code = loop(actions, reader)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0
    finally:
        if actions.recorder is not None:
            actions.recorder.close()
    if actions.pairs.leave() and out is None:
        leave_at_once(code)  # a thread is inside a library that cannot be called off
    return code


def make_console(settings: Settings) -> Console:
    """The screen, with colour as `settings.color` asks."""
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    color = {"always": "256", "never": None}.get(settings.color, "auto")
    never = True if settings.color == "never" else None
    return Console(color_system=color, no_color=never, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]


def is_live(console: Console) -> bool:
    """Whether there is a terminal that can be drawn on."""
    return sys.stdout.isatty() and not console.is_dumb_terminal


def prompt_reader(actions: Actions) -> Reader:
    """The prompt on a terminal."""
    from app.completion import completions

    def offer(line: str) -> list[Completion]:
        try:
            return completions(line, len(line), actions)
        except UserError:
            return []

    plain = actions.settings.ascii or not (actions.out.encoding or "").lower().startswith("utf")
    color = actions.out.color_system is not None and not actions.out.no_color
    return PromptReader(
        offer, lambda: status(actions), actions.hint, second=actions.just_stopped, ascii=plain, color=color
    )


def status(actions: Actions) -> str:
    """The prompt's bottom line."""
    from app.toolbar import toolbar

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
            _handle(actions, line)
    except UserError as error:
        actions.fail(str(error))
    except Exception as error:
        actions.fail(one_line(error))
        if actions.settings.verbose:
            actions.errors.print(traceback.format_exc())


def _handle(actions: Actions, line: str) -> None:
    actions.collect()
    editing, actions.editing = actions.editing, False
    text = dispatch(clean(line), actions)
    if text is not None:
        actions.editing = editing  # only the very next message takes the last one's place
        actions.send(text)
