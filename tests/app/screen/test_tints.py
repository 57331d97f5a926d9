"""Accepted text shows by its tint who proposed it, and the legend says which tint is whose."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from app.screen.figures import PaneData
from app.screen.legend import meanings
from app.screen.live import Track
from app.screen.palette import PALETTES, Look, tint
from app.screen.panes import pieces_of
from app.screen.rows import Drawn
from app.screen.spans import Span
from app.screen.view import Frame
from sampling.events import Step
from sampling.stats.summary import Stats

NAMES = ("glide", "maxgram", "bigram")
SPANS = [
    Span("A", "target"),
    Span(" river is", "accepted", 0),
    Span(" a natural", "accepted", 1),
    Span(" down", "rejected", 1),
    Span(" stream", "target"),
    Span(" of water", "accepted", 2),
]
STATS = Stats(predicted_n=9, predicted_ms=500, draft_n=8, draft_n_accepted=6, target_passes=3, openings=1)


def lane(name: str, names: tuple[str, ...], *sources: int) -> PaneData:
    """A lane whose accepted words are by these sources."""
    spans = [Span(f" {number}", "accepted", source) for number, source in enumerate(sources)]
    return PaneData(name, [Span("A", "target"), *spans], STATS, "done", names=names)


def shown(drawn: Drawn, color: bool = True) -> str:
    file = StringIO()
    system = "256" if color else None
    Console(
        width=drawn.look.width,
        file=file,
        color_system=system,
        force_terminal=color,
        no_color=not color,
        highlight=False,
    ).print(drawn)  # type: ignore[arg-type]
    return file.getvalue()


def words(*panes: PaneData) -> list[list[tuple[str, str]]]:
    """The legend's fields before "rejected": texts and roles."""
    fields = [[(text.strip(), role) for text, role in item.pieces] for item in meanings(Look(100), panes)]
    return fields[: fields.index([("rejected", "rejected")])]


# ---------------------------------------------------------------- panes


def test_accepted_text_has_the_tint_of_its_source() -> None:
    assert pieces_of(SPANS, Look(), tinted=True) == [
        ("A", "target"),
        (" river is", "accepted"),
        (" a natural", "accepted 2"),
        (" ", "plain"),
        ("down", "rejected"),
        (" ", "plain"),
        ("stream", "target"),
        (" of water", "accepted 3"),
    ]


def test_without_colour_nothing_tells_the_sources_apart() -> None:
    panes = [PaneData("cascade", SPANS, STATS, "done", names=names) for names in ((), NAMES)]
    one, other = (shown(Frame([pane], Look(100, color=False)), color=False) for pane in panes)
    assert one == other
    assert "maxgram" not in one


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("palette", PALETTES)
def test_a_tinted_lane_with_its_legend(width: int, palette: str, snapshot: SnapshotAssertion) -> None:
    panes = [lane("ngram", ("ngram",), 0), PaneData("cascade", SPANS, STATS, "done", names=NAMES)]
    assert shown(Frame(panes, Look(width, palette=palette))) == snapshot


def test_a_tracks_pane_knows_the_names_of_its_lane() -> None:
    drafter = SimpleNamespace(name="cascade", drafts=True, source_names=("glide", "maxgram"))
    step = Step(0, 2, (1, 2), (-1, 0), (0, 1), (0, 1), 3, (), (), 0.5, (), 0.0, 0.0, 0.0)
    track = Track(drafter, lambda ids: "".join(f" {token}" for token in ids), 1, 9)
    track.feed(step)
    pane = track.pane()
    assert pane.names == ("glide", "maxgram")
    assert [(span.kind, span.source) for span in pane.spans] == [("accepted", 0), ("accepted", 1), ("target", 0)]
    assert track.pane().tinted
    assert not Track(SimpleNamespace(name="ar", drafts=False), str, 1, 9).pane().tinted


# ---------------------------------------------------------------- the legend


def legend(*sources: int) -> list[tuple[str, str]]:
    return [piece for source in sources for piece in (("", "plain"), (NAMES[source], tint(source)))]


@pytest.mark.parametrize(
    "panes",
    [
        [],
        [PaneData("spec", SPANS, STATS, "done")],
        [lane("ngram", ("ngram",), 0)],
        [lane("cascade", NAMES, 0, 0)],
        [PaneData("ar", [Span("A", "plain")], STATS), lane("cascade", NAMES)],
    ],
)
def test_the_legend_says_accepted_where_all_of_it_has_that_tint(panes: list[PaneData]) -> None:
    assert words(*panes) == [[("accepted", "accepted")]]


def test_the_legend_does_not_give_one_name_two_tints() -> None:
    found = words(lane("cascade", NAMES, 0, 1), lane("tables", ("match", "tables", "glide"), 1, 2))
    assert [field[0][0] for field in found] == ["accepted in cascade:", "accepted in tables:"]


# ---------------------------------------------------------------- the palettes

# Linear RGB as seen without red and without green cones (Machado, Oliveira and Fernandes 2009, severity 1).


# ---------------------------------------------------------------- titles
