"""What the colours and marks mean, and who proposed what: the legend under the panes.

Where accepted text is tinted by who proposed it, the names that occur stand in their tints in place of the word
"accepted". Knows no layout but its own line and no figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.screen.figures import PaneData
from app.screen.palette import TINTS, Look, tint
from app.screen.rows import Drawn, Field, Row, field, flow

HINTS = ("/help", "/gamma N", "/trace", "Ctrl-C stops")


@dataclass(frozen=True, slots=True)
class Proposers:
    """Who proposed the accepted text of a lane: (source, name) of those that occur, in the order of its names."""

    label: str
    shown: tuple[tuple[int, str], ...]

    @property
    def told(self) -> bool:
        """Whether any of it has another tint than "accepted" has."""
        return any(tint(source) != TINTS[0] for source, _ in self.shown) or len(self.shown) > 1


def proposers(pane: PaneData) -> Proposers:
    """Those of a lane with several names; none of a lane with one, whose accepted text is not tinted."""
    if not pane.tinted:
        return Proposers(pane.label, ())
    sources = {span.source for span in pane.spans if span.kind == "accepted"}
    return Proposers(pane.label, tuple((i, name) for i, name in enumerate(pane.names) if i in sources))


def accepted(panes: Sequence[PaneData]) -> list[Field]:
    """The legend's words for accepted text: "accepted", or by whom.

    The lanes share one list of names unless a tint would then mean two of them: each lane has its own then.
    """
    accepting = [pane for pane in panes if any(span.kind == "accepted" for span in pane.spans)]
    found = [proposers(pane) for pane in accepting]
    named = [one for one in found if one.told]
    if not named:
        return [field("accepted", TINTS[0])]
    every = dict.fromkeys(entry for one in found for entry in one.shown)
    clear = len(every) == len({source for source, _ in every}) == len({name for _, name in every})
    if clear and all(one.shown for one in found):
        return [_by("accepted:", sorted(every))]
    lists = {one.shown: _by(f"accepted in {one.label}:", one.shown) for one in reversed(named)}
    return [*([] if len(named) == len(found) else [field("accepted", TINTS[0])]), *reversed(lists.values())]


def _by(words: str, shown: Sequence[tuple[int, str]]) -> Field:
    """The names in their tints, on one row."""
    names = [piece for source, name in shown for piece in ((" ", "plain"), (name, tint(source)))]
    return Field(((words, "plain"), *names))


class Legend(Drawn):
    """What the colours, or without them the marks, mean. `hints` adds a few commands.

    `panes` are the lanes on the screen, for the names of those that proposed accepted text.
    """

    def __init__(
        self, look: Look, panes: Sequence[PaneData] = (), *, hints: bool = False, show_discarded: bool = False
    ) -> None:
        self.look, self.panes, self.hints, self.discarded = look, panes, hints, show_discarded

    def fields(self) -> list[Field]:
        """The legend's words."""
        if self.look.color:
            first = accepted(self.panes)
            words = [("rejected", "rejected"), ("discarded", "discarded"), ("from the target", "target")]
        else:
            first = [field("text accepted", "accepted")]
            words = [("[-x-] rejected", "rejected"), ("[~x~] discarded", "discarded"), ("{+x+} from target", "target")]
        fields = [field(text, role) for text, role in words if role != "discarded" or self.discarded]
        return [*first, *fields, *(field(hint, "faint") for hint in (HINTS if self.hints else ()))]

    def rows(self) -> list[Row]:
        return flow(self.fields(), self.look)
