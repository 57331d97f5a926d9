"""A whole console without a terminal: scripted lines in, everything it printed out. Real decoding over
tiny random models, which know no language.
"""

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.console.repl import run_console
from app.console.state import ConsoleState
from app.screen.terminal import Screen
from app.settings.table import Layers, ModelOptions, Settings
from tests.support.tiny import TinyPair
from utils.errors import UserError

Line = str | Callable[[ConsoleState], None]


class ScriptedReader:
    """Gives the lines one by one; a function among them is called instead, to look or to interfere."""

    def __init__(self, state: ConsoleState, lines: Iterable[Line]) -> None:
        self.state, self._lines = state, iter(lines)
        self.defaults: list[str] = []
        self._left = False

    def read(self, default: str = "") -> str:
        self.defaults.append(default)
        for line in self._lines:
            self.state.out.print(
                f"\n<<< {line if isinstance(line, str) else line.__name__}", markup=False, soft_wrap=True
            )
            if isinstance(line, str):
                return line
            line(self.state)
            if self._left:
                break
        raise EOFError

    def refresh(self) -> None:
        """No status line."""

    def leave(self) -> None:
        """No line comes after this."""
        self._left = True


@dataclass
class Ran:
    """What a console did."""

    code: int
    text: str
    state: ConsoleState
    reader: ScriptedReader

    @property
    def errors(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("error:")]

    def after(self, line: str) -> str:
        """What was printed between the last such line and the next."""
        parts = re.split(r"\n<<< ", self.text)
        found = [part.partition("\n")[2] for part in parts if part.partition("\n")[0].strip() == line]
        assert found, f"{line!r} was not read"
        return found[-1]


def catalogue_of(folder: Path, pairs: dict[str, TinyPair], defaults: dict[str, Any] | None = None) -> Path:
    """A catalogue file of these pairs; those named with -ngram draft with n-grams."""
    lines = [f"default: {next(iter(pairs))}", "pairs:"]
    for name, pair in pairs.items():
        drafter = "ngram" if name.endswith("ngram") else f"{{path: {pair.drafter}}}"
        lines += [f"  {name}:", f"    target: {{path: {pair.target}}}", f"    drafter: {drafter}"]
    if defaults:
        lines += ["defaults:", *(f"  {name}: {value}" for name, value in defaults.items())]
    file = folder / "models.yaml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def run_lines(
    catalogue: Path,
    *lines: Line,
    width: int = 100,
    loader: Any = None,
    settings: Any = None,
    color: bool = False,
    layers: Layers | None = None,
) -> Ran:
    """Run a console over these lines. Without `settings` answers have at most 12 tokens; `layers` outrank those."""
    stream = io.StringIO()
    out = Screen(file=stream, width=width, height=30, color_system="standard" if color else None, legacy_windows=False)
    held: list[Any] = []

    def make_reader(state: ConsoleState) -> ScriptedReader:
        held.extend([state, ScriptedReader(state, lines)])
        return held[1]

    flags = {"max_new_tokens": 12, **(settings or {})}
    more = {"loader": loader} if loader else {}
    layers = layers or Layers(flags=Settings(**flags).model_dump())
    options = ModelOptions(models=str(catalogue), device="cpu")
    code = run_console(layers.settings, options, layers, make_reader=make_reader, out=out, **more)
    return Ran(code, stream.getvalue(), held[0], held[1])


def failing(*_: Any) -> Any:
    """A loader that fails."""
    raise UserError("no such folder")
