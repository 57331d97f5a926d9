"""Panes of a lane by its name alone, with the facts that a test gives."""

from collections.abc import Sequence

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
