"""A picture of the console from a real run: `python -m app.picture FILE.svg "MESSAGE" [FLAGS …]`.

The message is answered as in the console, by the same code; what the console would print is drawn
as an SVG of 100 columns. Knows nothing of its own about decoding or drawing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.errors import UsageError, UserError


def draw(message: str, flags: Sequence[str]) -> str:
    """The console after one message, as SVG."""
    from app.about import header
    from app.answering import answer
    from app.arguments import read_request
    from app.canvas import Canvas, question
    from app.cli import layers_of
    from app.export import drawing, svg
    from app.live import look_of
    from app.oneshot import load_engine
    from app.prompts import conversation
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
            raise UsageError('usage: python -m app.picture FILE.svg "MESSAGE" [FLAGS …]')
        Path(arguments[0]).write_text(draw(arguments[1], arguments[2:]), encoding="utf-8")
    except (UserError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
