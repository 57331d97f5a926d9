"""What the keys do at the prompt. Everything not named here is prompt_toolkit's Emacs mode
(Ctrl-R, Up, Ctrl-X Ctrl-E). Knows no commands.
"""

from __future__ import annotations

from collections.abc import Callable

from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, get_common_complete_suffix
from prompt_toolkit.filters import is_searching
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent

BLOCK = '"""'


def open_block(text: str) -> bool:
    """Whether `text` began a block with three quotes and has not ended it."""
    stripped = text.strip()
    return stripped.startswith(BLOCK) and not (len(stripped) >= 2 * len(BLOCK) and stripped.endswith(BLOCK))


def unblocked(text: str) -> str:
    """The inside of a closed block, never a command; any other text as it is."""
    stripped = text.strip()
    if not stripped.startswith(BLOCK) or open_block(text):
        return text
    inside = stripped[len(BLOCK) : -len(BLOCK)].strip("\n")
    return f"/{inside.lstrip()}" if inside.lstrip().startswith("/") else inside


def complete(buffer: Buffer) -> None:
    """Take the only completion or what all have in common, else walk through the menu.

    At once, not behind a completion that may still be running: a Tab typed quickly counts as well.
    """
    if buffer.complete_state:
        buffer.complete_next()
        return
    document = buffer.document
    found = list(buffer.completer.get_completions(document, CompleteEvent(completion_requested=True)))
    if len(found) == 1:
        buffer.apply_completion(found[0])
    elif common := get_common_complete_suffix(document, found):
        buffer.insert_text(common)
    elif found:
        buffer.start_completion()


class LeaveError(Exception):
    """Ctrl-C for the second time: leave at once."""


def key_bindings(hint: Callable[[str], None], second: Callable[[], bool]) -> KeyBindings:
    """Enter sends, Alt-Enter and Ctrl-J begin a line, Ctrl-C clears; `hint` shows one line for a moment.

    `second` tells whether another Ctrl-C has just stopped an answer: then this one leaves.
    """
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("tab")
    def _(event: KeyPressEvent) -> None:
        complete(event.current_buffer)

    @keys.add("c-c", filter=~is_searching)
    @keys.add("<sigint>", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        if second():
            event.app.exit(exception=LeaveError())
            return
        was_empty = not event.current_buffer.text
        event.current_buffer.reset()
        if was_empty:
            hint("Ctrl-D or /exit leaves")

    return keys
