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
    from app.console.about import header
    from app.console.answer import answer
    from app.prompts.questions import conversation
    from app.screen.live import look_of
    from app.screen.output import load_engine
    from app.screen.view import Canvas, question
    from sampling.loop import never

    request = read_request(["chat", *flags], os.environ)
    settings = layers_of(request).settings
    out = drawing()
    canvas = Canvas(settings, out)
    engine = load_engine(settings, request.options, never)
    chat = conversation(engine, settings)
    for warm_up in (True, False):  # the first answer of a process pays for memory that is touched first
        if not warm_up:
            canvas.say(header(engine, settings, out))
            canvas.say(question(message, look_of(out, settings)))
        answer(chat.plan(message), chat, engine, None, canvas)
        if warm_up:
            chat.undo()
            engine.forget()
            out.export_text(clear=True)
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
