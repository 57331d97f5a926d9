"""What the colours and marks mean, and who proposed what: the legend under the panes.

Where accepted text is tinted by who proposed it, the names that occur stand in their tints in place of the word
"accepted". Knows no layout but its own line and no figures.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.screen.figures import PaneData
from app.screen.palette import TINTS, Look, letters, tint
from app.screen.rows import Chunk, chunk

Proposers = tuple[tuple[int, str], ...]  # who proposed accepted text of a lane: (source, name), as it names them


def _proposers(pane: PaneData) -> Proposers:
    """Those that occur; none of a lane with one name, whose accepted text is not tinted."""
    sources = {span.source for span in pane.spans if span.kind == "accepted"}
    return tuple((i, name) for i, name in enumerate(pane.names) if i in sources and pane.tinted)


def _differs(shown: Proposers) -> bool:
    """Whether any of it has another tint than "accepted" has."""
    return len(shown) > 1 or any(tint(source) != TINTS[0] for source, _ in shown)


def accepted(panes: Sequence[PaneData]) -> list[Chunk]:
    """The legend's words for accepted text: "accepted", or by whom.

    The lanes share one list of names unless a tint would then mean two of them: each lane has its own then.
    """
    accepting = [pane for pane in panes if any(span.kind == "accepted" for span in pane.spans)]
    found = [(pane.label, _proposers(pane)) for pane in accepting]
    named = [(label, shown) for label, shown in found if _differs(shown)]
    if not named:
        return [chunk("accepted", TINTS[0])]
    every = {entry for _, shown in found for entry in shown}
    clear = len(every) == len({source for source, _ in every}) == len({name for _, name in every})
    if clear and all(shown for _, shown in found):
        return [_by("accepted:", sorted(every))]
    lists = {shown: _by(f"accepted in {label}:", shown) for label, shown in reversed(named)}
    return [*([] if len(named) == len(found) else [chunk("accepted", TINTS[0])]), *reversed(lists.values())]


def _lettered(panes: Sequence[PaneData]) -> list[Chunk]:
    """The letters of those that proposed accepted text, where lanes have several names."""
    marks = [(letters(pane.names)[source], name) for pane in panes for source, name in _proposers(pane)]
    return [chunk(f"{{{letter}:x}} {name}", "accepted") for letter, name in dict.fromkeys(marks)]


def _by(words: str, shown: Sequence[tuple[int, str]]) -> Chunk:
    """The names in their tints, on one row."""
    names = [piece for source, name in shown for piece in ((" ", "plain"), (name, tint(source)))]
    return Chunk(((words, "plain"), *names))


def meanings(look: Look, panes: Sequence[PaneData] = (), *, show_discarded: bool = False) -> list[Chunk]:
    """What the colours, or without them the marks, mean; `panes` are the lanes on the screen."""
    first = accepted(panes) if look.color else [chunk("text accepted", "accepted"), *_lettered(panes)]
    words = {"rejected": "[-x-] rejected", "discarded": "[~x~] discarded", "target": "{+x+} from target"}
    words["bonus"] = "{*x*} bonus"
    if look.color:
        words = {"rejected": "rejected", "discarded": "discarded", "target": "from the target", "bonus": "bonus"}
    kinds = {span.kind for pane in panes for span in pane.spans}
    gone = ({"discarded"} if not show_discarded else set()) | ({"bonus"} - kinds)
    return first + [chunk(text, role) for role, text in words.items() if role not in gone]
