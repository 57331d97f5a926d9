"""The screen of an answer, as pure renderables: header, panes, figures, verdict, legend; and where it is drawn outside
the console's own loop.

:class:`Frame` puts them together within `look.height` rows; whatever matters least goes first when there is no room.
What runs is one line, of a loaded pair or as a file tells of one, and so is the prompt's bottom line, which is drawn
while torch is still loading. Knows no models, no keyboard and no torch; it draws what it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from app.lanes.comparison import Verdict
from app.screen.figures import (
    RATES_NOTE,
    PaneData,
    Positions,
    StatsLines,
    details,
    note,
)
from app.screen.legend import HINTS, Legend
from app.screen.palette import Look
from app.screen.panes import Layout, SideBySide
from app.screen.rows import Drawn, Field, Row, field, flow, row_of, visible, wrap
from app.screen.spans import Span
from app.screen.terminal import Interrupts
from app.settings.layers import Settings
from utils.catalogue.specs import CASCADES, trained_kind

if TYPE_CHECKING:
    from app.lanes.lane import Engine
    from utils.loading.loaded import LoadedModel


Models = Mapping[str, str]  # pair, target, drafter, where


def models_of(engine: Engine) -> dict[str, str]:
    """The names of what is loaded, and where it runs."""
    target = engine.loaded.target
    return {
        "pair": engine.loaded.spec.name,
        "target": target.name,
        "drafter": drafter_name(engine),
        "where": f"{dtype_name(target)} {target.device}",
    }


def heading(models: Models, settings: Settings, look: Look, last_gamma: int | None = None) -> Header:
    """The line over everything; `last_gamma` is what `auto` chose last."""
    return Header(
        models.get("target", ""),
        models.get("drafter", ""),
        look,
        where=models.get("where", ""),
        gamma=gamma_text(settings, last_gamma),
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        no_repeat_ngram=settings.no_repeat_ngram,
        seed=settings.seed,
    )


def drafter_name(engine: Engine) -> str:
    """How the pair drafts, in a word or two."""
    loaded = engine.loaded
    if loaded.drafter is not None:
        return loaded.drafter.name
    names = {"ngram": "n-gram drafter", "tables": "n-gram tables", "maxgram": "max-gram drafter", "none": "no drafter"}
    names |= {word: f"{word} of {', '.join(loaded.spec.cascade_names)}" for word in CASCADES}
    kind = loaded.drafter_kind
    named = f"n-gram tables and {trained_kind(kind)} drafter" if "+" in kind else f"{kind} drafter"
    return names.get(kind, named)


def dtype_name(model: LoadedModel) -> str:
    """The number format of a model's weights."""
    name = model.dtype_text
    return name if model.quantization == "none" else f"{model.quantization} ({name})"


def gamma_text(settings: Settings, last: int | None) -> str:
    """4, or auto(3) where 3 is what `auto` chose for the last round; auto before the first."""
    return f"auto({last})" if settings.gamma == "auto" and last is not None else str(settings.gamma)


def toolbar(pair: str, settings: Settings, loading: str, used: int, context: int, last: int | None = None) -> str:
    """Pair, progress of loading, settings and context, what matters most first; `last`: gamma of the last round."""
    parts = [f"{pair}: {loading}" if loading else pair]
    parts += [f"gamma {gamma_text(settings, last)}", f"T {settings.temperature:g}", ",".join(settings.compare)]
    if settings.temperature:
        parts.append(f"seed {settings.seed}")
    if context:
        parts.append(f"{used:,} / {context:,} tokens")
    return "  ".join(parts)


class Header(Drawn):
    """What runs: target ← drafter, dtype and device, gamma, T, top-p, seed."""

    def __init__(
        self,
        target: str,
        drafter: str,
        look: Look,
        *,
        where: str = "",
        gamma: int | str = 4,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        no_repeat_ngram: int = 0,
        seed: int = 42,
    ) -> None:
        self.look = look
        names = [field(target, "strong")]
        if drafter:
            names.append(field(f"{look.glyph('arrow')} {drafter}", "plain", " "))
        texts = [where, f"{look.glyph('gamma')} {gamma}", f"T {temperature:g}", f"top-p {top_p:g}"]
        texts += [f"top-k {top_k}"] if top_k else []
        texts += [f"min-p {min_p:g}"] if min_p else []
        texts += [f"penalty {repetition_penalty:g}"] if repetition_penalty != 1 else []
        texts += [f"no {no_repeat_ngram}-gram twice"] if no_repeat_ngram else []
        self.fields = names + [field(text, "faint", "   ") for text in [*texts, f"seed {seed}"] if text]

    def rows(self) -> list[Row]:
        return flow(self.fields, self.look, 2)


class Answer(Drawn):
    """An answer for the scrollback: its text alone, wrapped, and a note under it if it is not whole."""

    def __init__(self, content: str | Sequence[Span], look: Look, note: str = "") -> None:
        self.look, self.note = look, note
        self.text = content if isinstance(content, str) else "".join(s.text for s in content if s.committed)

    def rows(self) -> list[Row]:
        lines = wrap([(self.text, "plain")], self.look.width, self.look.ascii)
        rows = [row_of(line, self.look) for line in lines]
        return rows + (flow([field(self.note, "faint")], self.look) if self.note else [])


class Block(NamedTuple):
    """Rows that are shown or left out together; a lower rank matters more."""

    rank: int
    rows: list[Row]


class Summary(Drawn):
    """Everything under the panes: figures, verdict, acceptance by position, notes, legend."""

    def __init__(
        self,
        panes: Sequence[PaneData],
        look: Look,
        verdict: Verdict | None = None,
        *,
        legend: bool = True,
        hints: bool = False,
        show_discarded: bool = False,
    ) -> None:
        self.panes, self.look, self.verdict = panes, look, verdict
        self.drafting = [pane for pane in panes if pane.drafting]
        self.telling = [pane for pane in panes if pane.telling]
        marks = legend and any(span.kind != "plain" for pane in panes for span in pane.spans)
        self.legend = Legend(look, panes, show_discarded=show_discarded).fields() if marks else []
        self.hints = [field(hint, "faint") for hint in (HINTS if hints else ())]

    def blocks(self) -> list[Block]:
        """The parts from top to bottom."""
        look = self.look
        blocks = [Block(0, StatsLines(self.panes, look).rows()), Block(1, self._verdict())]
        if look.color:
            if len(self.telling) > 1:
                blocks.append(Block(3, [row for pane in self.telling for row in self._named(pane)]))
            blocks.append(Block(4, Positions(self.drafting[-1].stats if self.drafting else None, look).rows()))
        blocks += [Block(2, self._notes()), Block(5, flow(self._reading_aids(), look))]
        return [block for block in blocks if block.rows]

    def _verdict(self) -> list[Row]:
        """With colour the verdict and one lane's acceptance share a line, without it verdict and legend."""
        fields: list[Field] = []
        if self.verdict is not None:
            text = self.verdict.text
            times = self.look.glyph("times")
            fields.append(
                field(
                    text.replace("x faster", f"{times} faster").replace("x slower", f"{times} slower"),
                    self.verdict.style,
                )
            )
        if self.look.color:
            fields += details(self.telling[0], self.look) if len(self.telling) == 1 else []
        elif self.verdict is not None and self.legend:
            fields += [self.legend[0]._replace(before=" | "), *self.legend[1:]]
        return flow(fields, self.look)

    def _reading_aids(self) -> list[Field]:
        """The legend (where the verdict does not carry it), a few commands, what the figures leave out."""
        legend = self.legend if self.look.color or self.verdict is None else []
        begun = any(pane.tokens for pane in self.panes)
        return [*legend, *self.hints, *([field(RATES_NOTE, "faint")] if begun else [])]

    def _named(self, pane: PaneData) -> list[Row]:
        label = max(len(other.label) for other in self.panes)
        return flow([field(pane.label.ljust(label), "faint"), *details(pane, self.look)], self.look, label + 2)

    def _notes(self) -> list[Row]:
        """Why the answer that the conversation goes on with is not whole."""
        text = note(self.panes[-1]) if self.panes else ""
        return flow([field(text, "bad")], self.look) if text else []

    def rows(self) -> list[Row]:
        return [row for block in self.blocks() for row in block.rows]


class Frame(Drawn):
    """The whole screen while lanes run and when they are done; never higher than `look.height`."""

    def __init__(
        self,
        panes: Sequence[PaneData],
        look: Look,
        *,
        layout: Layout = "auto",
        verdict: Verdict | None = None,
        header: Header | None = None,
        legend: bool = True,
        hints: bool = False,
        show_discarded: bool = False,
    ) -> None:
        self.look, self.header = look, header
        self.body = SideBySide(panes, look, layout, show_discarded=show_discarded)
        self.summary = Summary(panes, look, verdict, legend=legend, hints=hints, show_discarded=show_discarded)

    def rows(self) -> list[Row]:
        head = [Block(7, self.header.rows())] if self.header else []
        below = self.summary.blocks()
        if self.look.height is not None:
            while (blocks := head + below) and self._excess(blocks) > 0:
                last = max(block.rank for block in blocks)
                head = [block for block in head if block.rank != last]
                below = [block for block in below if block.rank != last]
        above, under = ([row for block in part for row in block.rows] for part in (head, below))
        room = None if self.look.height is None else self.look.height - len(above) - len(under)
        return above + self.body.within(room) + under

    def _excess(self, blocks: list[Block]) -> int:
        """Rows too many. The lanes' figures go only when the texts would have less than two rows each."""
        figures_only = all(block.rank == 0 for block in blocks)
        texts = min(2 * len(self.body.groups), self.body.needed) if figures_only else self.body.least
        return sum(len(block.rows) for block in blocks) + texts - (self.look.height or 0)


@dataclass
class Canvas:
    """Satisfies :class:`app.console.answer.Place`."""

    settings: Settings
    out: Console
    live: bool = False
    stop: Interrupts = dataclasses.field(default_factory=Interrupts)
    recorder: None = None  # what is drawn here has been recorded, or is not to be

    def say(self, what: Any) -> None:
        self.out.print(Text(what) if isinstance(what, str) else what)

    def hint(self, text: str) -> None:
        self.out.print(Text(text, style="dim"))


def question(text: str, look: Look) -> Text:
    """A message as it was typed, behind the prompt's sign."""
    return Text(f"{look.glyph('prompt')} {visible(text, look.ascii)}", style=look.style("question") or "")
