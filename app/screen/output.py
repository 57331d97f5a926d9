"""What a command that is no console shows: how far it is on standard error, small tables; tables in Markdown too.

Loading says how far it is; so does work that answers prompts, seldom where that is no terminal. At most 100 columns
where a table goes to a file. Knows no figures and no answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from app.screen.palette import want_color
from app.screen.terminal import Screen, size_in
from app.settings.table import ModelOptions, Settings
from utils.errors import UserError
from utils.progress import Remaining

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


_WIDTH = 100  # columns of a table that goes to no terminal


def answer_bar(total: int, settings: Settings, known: int = 0) -> Any:
    """A tqdm bar over `total` answers, `known` of which are there already; --quiet shows none."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=known,
        unit="answer",
        disable=settings.quiet,
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 10,
        leave=False,
    )


def load_engine(
    settings: Settings, options: ModelOptions, cancelled: Callable[[], bool], *, servers: bool = False
) -> PairEngine:
    """Load the pair that the options name, with its progress on standard error. UserError for a server as its target,
    unless `servers` will do."""
    from app.lanes.pairing import choose_pair, drafter_words, load, load_options

    spec = choose_pair(options)  # what is wrong with the pair is said before torch is loaded
    if spec.target.url is not None and not servers:
        raise UserError(f"{spec.target.url} is a server: the console and run talk to one, this needs a model here")
    with LoadProgress(sys.stderr, quiet=settings.quiet) as progress, drafter_words(spec):
        from app.lanes.lane import PairEngine
        from app.lanes.warm import warm_up

        engine = PairEngine(load(spec, load_options(options), progress, cancelled))
        warm_up(engine)
    if not settings.quiet:
        for note in engine.notes:
            sys.stderr.write(f"{note}\n")
    return engine


class LoadProgress:
    """One line on a terminal that shows what is being loaded; elsewhere only long work is named, once."""

    def __init__(self, stream: IO[str], *, quiet: bool) -> None:
        self._stream, self._quiet = stream, quiet
        self._live = stream.isatty()
        self._stage, self._remaining = "", Remaining()

    def __call__(self, stage: str, fraction: float | None) -> None:
        if self._quiet:
            return
        if self._live:
            self._stream.write(f"\r\x1b[K{stage}{self._remaining.text(stage, fraction)}")
        elif fraction is not None and stage != self._stage:
            self._stream.write(f"{stage}\n")
        self._stream.flush()
        self._stage = stage

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the line off the terminal."""
        if self._live and self._stage:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def target_tokenizer(settings: Settings, options: ModelOptions, cancelled: Callable[[], bool]) -> tuple[Any, int]:
    """The target's tokenizer and how many ids it has; the weights are not loaded."""
    from app.lanes.pairing import choose_pair, load_options
    from utils.loading.build import load_tokenizer
    from utils.loading.quiet import quiet_environment
    from utils.loading.sources import model_folder

    quiet_environment()
    target = choose_pair(options).target
    with LoadProgress(sys.stderr, quiet=settings.quiet) as progress:
        tokenizer = load_tokenizer(
            model_folder(target, load_options(options), progress, cancelled, weights=False), load_options(options)
        )
    if tokenizer is None:
        raise UserError(f"{target.name} has no tokenizer files: they are needed")
    return tokenizer, max(tokenizer.get_vocab().values()) + 1


def screen(settings: Settings, stream: TextIO, width: int = _WIDTH) -> Console:
    """The console for figures on `stream`: --color outranks the environment, COLUMNS the `width` where it is no
    terminal.
    """
    color = want_color(settings, stream, os.environ)
    wide = None if stream.isatty() else size_in(os.environ) or width
    return Screen(file=stream, width=wide, force_terminal=color, no_color=not color)


def print_table(console: Console, title: str, table: Table) -> None:
    """The title has the console's width, not the table's."""
    console.print(title, style="italic", markup=False)
    console.print(table)


def small_table(settings: Settings) -> Table:
    """A table without frame."""
    lines = box.ASCII if settings.ascii else box.SIMPLE_HEAD
    narrow: dict[str, Any] = {"show_edge": False, "pad_edge": False, "padding": (0, 0, 0, 1)}
    return Table(box=lines, **narrow)


def fitted(console: Console, settings: Settings, rows: Sequence[dict[str, str]], least: Sequence[str]) -> Table:
    """Rows of cells by column; while they are too wide for the console the columns of `least` go, first to last."""
    for gone in range(len(least) + 1):
        table = small_table(settings)
        names = [name for name in rows[0] if name not in least[:gone]]
        for name in names:
            table.add_column(name, no_wrap=name == "method", justify="left" if name == "method" else "right")
        for row in rows:
            table.add_row(*(row[name] for name in names))
        if table_width(table, console) <= console.width:
            break
    return table


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The lines of a table in Markdown, without the last one's end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def table_width(table: Table, console: Console) -> int:
    """The columns it would take on an endless screen."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum
