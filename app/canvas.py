"""Where answers are drawn instead of in the console's own loop: a picture, an exported file, a replay. No models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from app.palette import Look
from app.settings import Settings
from app.terminal import Interrupts
from app.wrap import visible

if TYPE_CHECKING:
    from app.recorder import Recorder


@dataclass
class Canvas:
    """Satisfies :class:`app.answering.Place`."""

    settings: Settings
    out: Console
    live: bool = False
    stop: Interrupts = field(default_factory=Interrupts)
    recorder: Recorder | None = None

    def say(self, what: Any) -> None:
        self.out.print(Text(what) if isinstance(what, str) else what)

    def hint(self, text: str) -> None:
        self.out.print(Text(text, style="dim"))


def question(text: str, look: Look) -> Text:
    """A message as it was typed, behind the prompt's sign."""
    return Text(f"{look.glyph('prompt')} {visible(text, look.ascii)}", style=look.style("question") or "")
