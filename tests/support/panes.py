"""Panes of a lane by its name alone, with the facts that a test gives; and how a terminal gets what is drawn."""

from collections.abc import Sequence
from io import StringIO
from typing import Any

from rich.console import Console

from app.lanes.costs import LaneRecord, Terms
from app.screen.panes import PaneData, Round, State
from app.screen.spans import Span
from app.settings.table import Settings
from sampling.stats.summary import Stats


def pane_of(
    name: str,
    spans: Sequence[Span] = (),
    stats: Stats | None = None,
    state: State = "waiting",
    progress: str = "",
    *,
    limit: int = 128,
    names: tuple[str, ...] = (),
    rounds: Sequence[Round] = (),
) -> PaneData:
    """A lane as it stands; `names` are those of its sources."""
    lane = LaneRecord(name, Terms(sources=names), settings=Settings(max_new_tokens=limit))
    return PaneData(lane, spans, stats, state, progress, rounds=rounds)


def printed(drawn: Any, width: int = 100, colors: Any = None) -> str:
    """What a terminal of this width and these colours ("256", "truecolor"; none) receives."""
    console = Console(
        file=StringIO(),
        width=width,
        color_system=colors,
        force_terminal=bool(colors),
        no_color=not colors,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(drawn)
    return captured.get()
