"""Output of the commands other than the console: progress on standard error, small tables, and tables in Markdown.

Loading and answering many prompts show their progress, less often if standard error is no terminal. A table that goes
to a file has at most 100 columns, unless the caller or COLUMNS says otherwise. Knows no figures and no answers.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, NoReturn, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from tqdm import tqdm

from app.lanes.pairing import choose_pair, drafter_words, load, load_options
from app.screen.terminal import make_console, size_in
from app.settings.table import ModelOptions, Settings
from utils.errors import UserError
from utils.objects import HfTokenizer
from utils.progress import Progress, Remaining, never
from utils.visible import to_stderr, visible

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


_WIDTH = 100  # columns of a table that goes to no terminal


def answer_bar(total: int, settings: Settings, done: int = 0) -> "tqdm[NoReturn]":
    """Return a tqdm bar over `total` answers, `done` of which an earlier run made; --quiet shows none."""
    return tqdm(
        total=total,
        initial=done,
        unit="answer",
        disable=settings.quiet,
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 10,
        leave=False,
    )


def load_engine(
    settings: Settings, options: ModelOptions, cancelled: Callable[[], bool], *, servers: bool = False
) -> "PairEngine":
    """Load the pair that the options name and warm it up, with progress on standard error. UserError if its target is a
    server, unless `servers` are allowed."""
    spec = choose_pair(options)  # a wrong pair is an error before torch is loaded
    if spec.target.url is not None and not servers:
        raise UserError(f"{spec.target.url} is a server: the console and run talk to one, this needs a model here")
    with load_progress(sys.stderr, quiet=settings.quiet, cancelled=cancelled) as progress, drafter_words(spec):
        from app.lanes.lane import PairEngine
        from app.lanes.warm import warm_up

        engine = PairEngine(load(spec, load_options(options), progress))
        warm_up(engine)
    if not settings.quiet:
        to_stderr(*engine.notes)
    return engine


@contextmanager
def load_progress(stream: IO[str], *, quiet: bool, cancelled: Callable[[], bool] = never) -> Iterator[Progress]:
    """Yield a progress that shows long work in one line on a terminal; elsewhere it names a stage once, if one of its
    reports has a fraction.

    The name of a stage is its text up to the first comma.
    """
    live, remaining, shown = stream.isatty(), Remaining(), ""

    def show(stage: str, fraction: float | None) -> None:
        nonlocal shown
        name = stage.partition(",")[0]
        if quiet or (not live and (fraction is None or name == shown)):
            return
        stream.write(f"\r\x1b[K{visible(stage)}{remaining.text(name, fraction)}" if live else f"{visible(name)}\n")
        stream.flush()
        shown = name

    try:
        yield Progress(show, cancelled)
    finally:
        if live and shown:
            stream.write("\r\x1b[K")
            stream.flush()


def target_tokenizer(settings: Settings, options: ModelOptions, cancelled: Callable[[], bool]) -> HfTokenizer:
    """Return the target's tokenizer; the weights are not loaded."""
    from utils.loading.build import load_tokenizer
    from utils.loading.quiet import quiet_environment
    from utils.loading.sources import model_folder

    quiet_environment()
    target = choose_pair(options).target
    with load_progress(sys.stderr, quiet=settings.quiet, cancelled=cancelled) as progress:
        tokenizer = load_tokenizer(
            model_folder(target, load_options(options), progress, weights=False, tokenizer_only=True),
            load_options(options),
        )
    if tokenizer is None:
        raise UserError(f"{target.name} has no tokenizer files: they are needed")
    return tokenizer


def screen(settings: Settings, stream: TextIO, width: int = _WIDTH) -> Console:
    """Return the console for figures on `stream`; COLUMNS outranks the `width` where it is no terminal."""
    return make_console(settings, file=stream, width=None if stream.isatty() else size_in(os.environ) or width)


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a table under its title, which is wrapped at the console's width, not at the table's."""
    console.print(title, style="italic", markup=False)
    console.print(table)


def small_table(settings: Settings, *columns: Column) -> Table:
    """Return an empty table without a frame."""
    return Table(
        *columns,
        box=box.ASCII if settings.ascii else box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )


def fitted(console: Console, settings: Settings, rows: Sequence[dict[str, str]], optional: Sequence[str] = ()) -> Table:
    """Return a table of rows (cells by column). While it is too wide for the console, columns of `optional` are left
    out, first to last.
    """
    endless = console.options.update(max_width=10_000)
    for dropped in range(len(optional) + 1):
        first, *names = (name for name in rows[0] if name not in optional[:dropped])
        table = small_table(settings, Column(first, no_wrap=True), *(Column(name, justify="right") for name in names))
        for row in rows:
            table.add_row(*(row[name] for name in (first, *names)))
        if Measurement.get(console, endless, table).maximum <= console.width:
            break
    return table


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, without a line break at its end."""
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in (head, ["---"] * len(head), *rows)
    )
