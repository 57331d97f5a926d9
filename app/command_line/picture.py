"""A picture of the console from a real run: `python -m app.command_line.picture FILE.svg "MESSAGE" [FLAGS …]`.

The message is answered as in the console, by the same code; what the console would print is drawn
as an SVG of 100 columns. Knows nothing of its own about decoding or drawing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from utils.errors import UsageError, UserError
from utils.files import write_text


def draw(message: str, flags: Sequence[str]) -> str:
    """The console after one message, as SVG."""
    from app.chat.export import drawing, svg
    from app.command_line.arguments import read_request
    from app.command_line.main import layers_of
    from app.console.answer import answer
    from app.console.state import ConsoleState
    from app.screen.live import look_of
    from app.screen.output import load_engine
    from app.screen.view import question
    from utils.progress import never

    request = read_request(["chat", *flags], os.environ)
    layers, out = layers_of(request), drawing()
    engine = load_engine(layers.settings, request.options, never)
    state = ConsoleState(layers, request.options, out, out, lambda *_: engine, live=False)
    state.pairs.engine, state.pairs.spec = engine, engine.loaded.spec
    state.adopt(engine)
    chat = state.conversation()
    answer(chat.plan(message), state)  # the first answer of a process pays for memory that is touched first
    chat.undo()
    engine.forget()
    state.session = None
    out.export_text(clear=True)
    state.adopt(engine)
    state.say(question(message, look_of(out, state.settings)))
    answer(chat.plan(message), state)
    return svg(out)


def main(arguments: Sequence[str]) -> int:
    """0 when the picture is written."""
    try:
        if len(arguments) < 2 or arguments[0].startswith("-"):
            raise UsageError('usage: python -m app.command_line.picture FILE.svg "MESSAGE" [FLAGS …]')
        write_text(arguments[0], draw(arguments[1], arguments[2:]))
    except (UserError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
