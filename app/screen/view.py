"""The screen of an answer, as pure renderables: heading, panes, figures, comparison, legend; and the surface on which
commands show them.

:class:`Frame` puts panes and the parts below them together within `look.height` rows; if there is no room, the least
important part is left out first. The heading says which models run, those of a loaded pair or of a file. The prompt's
bottom line is made here too; it is drawn while torch is still loading, so importing this imports no torch. Knows no
keyboard.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from app.lanes.answers import Comparison
from app.lanes.costs import LaneRecord
from app.screen.palette import TINTS, Look, letters, tint
from app.screen.panes import (
    RATES_NOTE,
    Layout,
    PaneData,
    SideBySide,
    TimeLine,
    bars_key,
    details,
    note,
    positions,
    stats_lines,
    timeline,
    title_of,
)
from app.screen.rows import Chunk, Drawn, Lines, Row, chunk, flow, share
from app.screen.terminal import Interrupts
from app.settings.table import Settings
from app.settings.types import SHOWN
from utils.catalogue.specs import CASCADES, head_kind_of
from utils.kernels.build import instruction_set, why_not
from utils.loading.loaded import LoadedModel
from utils.visible import visible

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


Models = Mapping[str, str]  # pair, target, drafter, where


def models_of(engine: "PairEngine") -> dict[str, str]:
    """Return the names of the loaded models, and where they run."""
    target, server = engine.loaded.target, engine.server
    return {
        "pair": engine.loaded.spec.name,
        "target": target.name,
        "drafter": "" if engine.reads_text else drafter_name(engine),
        "where": f"{dtype_name(target)} {target.device}" if server is None else server.address,
    }


def heading(models: Models, settings: Settings, look: Look, drafted: float | None = None) -> Lines:
    """Return the heading: target ← drafter, dtype and device, gamma, T, top-p, seed.

    `drafted`: the mean number of tokens that `gamma auto` drafts a round.
    """
    models = {name: visible(text, look.ascii) for name, text in models.items() if isinstance(text, str)}
    names = [chunk(models.get("target", ""), "strong")]
    if drafter := models.get("drafter"):
        names.append(chunk(f"{look.glyph('arrow')} {drafter}", "plain", " "))
    texts = [
        models.get("where", ""),
        f"{look.glyph('gamma')} {gamma_text(settings, drafted)}" if drafter else "",
        f"T {settings.temperature:g}",
        *([] if settings.top_p != 1 else ["top-p 1"]),
        *filters(settings),
        f"seed {settings.seed}",
    ]
    return Lines(flow([*names, *(chunk(text, "faint", "   ") for text in texts if text)], look, 2), look)


def filters(settings: Settings) -> list[str]:
    """Return, in words, the settings besides the temperature that change the target's distribution now."""
    texts = {
        f"top-p {settings.top_p:g}": settings.top_p != 1,
        f"top-k {settings.top_k}": settings.top_k,
        f"min-p {settings.min_p:g}": settings.min_p,
        f"penalty {settings.repetition_penalty:g}": settings.repetition_penalty != 1,
        f"presence {settings.presence_penalty:g}": settings.presence_penalty,
        f"frequency {settings.frequency_penalty:g}": settings.frequency_penalty,
        f"typical-p {settings.typical_p:g}": settings.typical_p != 1,
        f"bias {len(settings.logit_bias)}": settings.logit_bias,
        f"no {settings.no_repeat_ngram}-gram twice": settings.no_repeat_ngram,
        " ".join(" ".join(settings.form or ()).split())[:SHOWN]: settings.form,
    }
    return [text for text, shapes in texts.items() if shapes]


def drafter_name(engine: "PairEngine") -> str:
    """Return the name of the pair's drafter."""
    loaded = engine.loaded
    if loaded.drafter is not None:
        beside = {"match": "matches and ", "tables": "n-gram tables and "}.get(loaded.spec.beside or "", "")
        return beside + loaded.drafter.name
    names = {
        **{"ngram": "n-gram drafter", "tables": "n-gram tables", "maxgram": "max-gram drafter", "none": "no drafter"},
        **{word: f"{word} of {', '.join(loaded.spec.cascade_names)}" for word in CASCADES},
    }
    word = loaded.drafter_word
    named = f"n-gram tables and {head_kind_of(word)} drafter" if "+" in word else f"{word} drafter"
    return names.get(word, named)


def drafting(models: Models, lanes: Sequence[str]) -> Models:
    """Return `models` with the drafters of these lanes: the pair's if `spec` is one of them, else the lanes' own."""
    own = [title_of(LaneRecord(name)) for name in lanes if name != "ar"]
    return {**models, "drafter": ", ".join(own)} if own and "spec" not in lanes else models


def dtype_name(model: LoadedModel) -> str:
    """Return the number format of a model's weights."""
    name = model.dtype_text
    return name if model.quantization == "none" else f"{model.quantization} ({name})"


def kernels_of(model: LoadedModel) -> str:
    """Return whether compiled kernels, and for activations of how many bits, or torch compute the model's products and
    its pass, and why torch does."""
    from utils.loading.packed_gguf import packed_weights

    if (row := instruction_set()) is not None and packed_weights(model.model):
        return (
            f"compiled for {row.name}{model.activations and f', {model.activations[1:]}-bit activations'}"
            f"{model.expanded and f'; the pass in torch: {model.expanded}'}"
        )
    return f"torch ({why_not()})" if why_not() else "torch"


def gamma_text(settings: Settings, drafted: float | None) -> str:
    """Return "4", or "auto(2.3)" if `auto` drafts 2.3 tokens a round; "auto" before the first round."""
    return f"auto({drafted:.1f})" if settings.gamma == "auto" and drafted is not None else str(settings.gamma)


def toolbar(pair: str, settings: Settings, loading: str, used: int, context: int, drafted: float | None = None) -> str:
    """Return the prompt's bottom line, the most important part first; `drafted`: tokens a round of `gamma auto`."""
    parts = [
        f"{pair}: {loading}" if loading else pair,
        f"gamma {gamma_text(settings, drafted)}",
        f"T {settings.temperature:g}",
        *filters(settings),
        ",".join(settings.compare),
        f"seed {settings.seed}" if settings.temperature else "",
        f"slow {settings.show('slow')}" if settings.slow != 1 else "",
        f"{used:,} / {context:,} tokens" if context else "",
    ]
    return "  ".join(filter(None, parts))


class Section(NamedTuple):
    """Rows that are shown or left out together; a lower rank matters more."""

    rank: int
    rows: list[Row]


def _resting(label: str, c: float, alpha: float | None) -> str:
    """Return why a lane does not draft."""
    why = "none was worth a wider pass" if alpha is None else f"alpha {share(alpha)}"
    return f"{label}: drafts do not pay here: c {share(c)}, {why}"


Proposers = tuple[tuple[int, str], ...]  # (source, name) of the sources whose accepted drafts a lane shows in tints


def _proposers(pane: PaneData) -> Proposers:
    sources = {span.source for span in pane.spans if span.kind == "accepted"}
    return tuple((i, name) for i, name in enumerate(pane.names) if i in sources and len(pane.names) > 1)


def _accepted(panes: Sequence[PaneData]) -> list[Chunk]:
    """Return the legend's words for accepted text: "accepted", or the sources in their tints, by lane where needed."""
    lists: dict[Proposers, str] = {}
    for pane in panes:
        if any(span.kind == "accepted" for span in pane.spans):
            lists.setdefault(_proposers(pane), pane.label)
    chunks = []
    for names, label in lists.items():
        words = f"accepted in {label}:" if len(lists) > 1 else "accepted:"
        tinted = [piece for source, name in names for piece in ((" ", "plain"), (name, tint(source, name)))]
        chunks.append(Chunk(((words, "plain"), *tinted)) if names else chunk("accepted", TINTS[0]))
    return chunks or [chunk("accepted", TINTS[0])]


def meanings(look: Look, panes: Sequence[PaneData] = (), *, show_discarded: bool = False) -> list[Chunk]:
    """Return the legend for these lanes: the meanings of the colours, or without colour of the marks."""
    if look.color:
        first = _accepted(panes)
        words = {
            **{"rejected": "rejected", "discarded": "discarded", "target": "from the target", "bonus": "bonus"},
            **{"forced": "forced", "differs": "differs from AR"},
        }
    else:
        marks = [(letters(pane.names)[source], name) for pane in panes for source, name in _proposers(pane)]
        named = [f"{{{letter}:x}} {name}" for letter, name in dict.fromkeys(marks)]
        bare = not named or any(span.kind == "accepted" for pane in panes if len(pane.names) < 2 for span in pane.spans)
        texts = ["text accepted"] * bare + [f"accepted: {', '.join(named)}"] * bool(named)
        first = [chunk(text, "accepted") for text in texts]
        words = {
            **{"rejected": "[-x-] rejected", "discarded": "[~x~] discarded", "target": "{+x+} from target"},
            **{"bonus": "{*x*} bonus", "forced": "{!x!} forced", "differs": "{#x#} differs from AR"},
        }
    kinds = {span.kind for pane in panes for span in pane.spans}
    gone = ({"discarded"} if not show_discarded else set()) | ({"bonus", "forced", "differs"} - kinds)
    return first + [chunk(text, role) for role, text in words.items() if role not in gone]


class Summary(Drawn):
    """Everything under the panes: figures, comparison, acceptance by position, notes, legend."""

    def __init__(
        self,
        panes: Sequence[PaneData],
        look: Look,
        comparisons: Sequence[Comparison] = (),
        *,
        legend: bool = True,
        show_discarded: bool = False,
        notes: bool = True,
        can_continue: bool = True,
    ) -> None:
        self.panes, self.explained = panes, [pane for pane in panes if pane.drafts_or_searches]
        self.look, self.comparisons, self.notes, self.can_continue = look, comparisons, notes, can_continue
        marks = legend and any(span.kind != "plain" for pane in panes for span in pane.spans)
        self.legend = meanings(look, panes, show_discarded=show_discarded) if marks else []

    def blocks(self) -> list[Section]:
        """Return the sections from top to bottom."""
        look, drafting = self.look, [pane for pane in self.panes if pane.drafting]
        blocks = [
            Section(4, self._timeline()),
            Section(0, stats_lines(self.panes, look).rows()),
            Section(1, self._compared()),
        ]
        if look.color:
            if len(self.explained) > 1:
                blocks.append(Section(3, [row for pane in self.explained for row in self._named(pane)]))
            for pane in drafting[-1:]:
                blocks.append(Section(5, flow(positions(pane.stats, look, pane.label * (len(drafting) > 1)), look, 2)))
        # The last lane's answer, which the chat continues from, may be incomplete: the note says why.
        text = note(self.panes[-1], can_continue=self.can_continue) if self.panes and self.notes else ""
        resting = (_resting(pane.label, *pane.resting) for pane in self.panes if pane.resting)
        chunks = [chunk(text, "bad"), *(chunk(line, "faint") for line in resting)]
        notes = [row for each in chunks if each.width for row in flow([each], look)]
        blocks += [Section(2, notes), Section(6, flow(self._reading_aids(), look))]
        return [block for block in blocks if block.rows]

    def _timeline(self) -> list[Row]:
        """Return the row with the rounds of the last lane that drafts, beside plain decoding's rates."""
        plain = next(((pane.label, pane.rounds) for pane in self.panes if pane.lane.name == "ar"), None)
        return [row for line in self._lines()[-1:] for row in timeline(line, plain, self.look)]

    def _lines(self) -> list[TimeLine]:
        """Return name and rounds of each lane with a drafter, also of one that has not drafted yet."""
        return [(pane.label, pane.rounds) for pane in self.panes if pane.rounds and (pane.drafting or pane.names)]

    def _compared(self) -> list[Row]:
        """Return a line for each comparison; after the last the acceptance of the only drafting lane, or without colour
        the legend."""
        times, more = self.look.glyph("times"), []
        if self.look.color:
            more = details(self.explained[0], self.look) if len(self.explained) == 1 else []
        elif self.comparisons and self.legend:
            more = [self.legend[0]._replace(before=" | "), *self.legend[1:]]
        lines = [
            [chunk(re.sub("x (?=faster|slower)", f"{times} ", each.text), each.style)] for each in self.comparisons
        ]
        *others, last = lines or [[]]
        return [row for line in (*others, [*last, *more]) for row in flow(line, self.look)]

    def _reading_aids(self) -> list[Chunk]:
        """Return the legend (unless it follows the comparison), and a note of what the figures leave out."""
        legend = self.legend if self.look.color or not self.comparisons else []
        if self.legend and self._lines():
            legend = [*legend, chunk(bars_key(self.look), "faint")]
        return legend + ([chunk(RATES_NOTE, "faint")] if any(pane.tokens for pane in self.panes) else [])

    def _named(self, pane: PaneData) -> list[Row]:
        label = max(len(other.label) for other in self.panes)
        return flow([chunk(pane.label.ljust(label), "faint"), *details(pane, self.look)], self.look, label + 2)

    def rows(self) -> list[Row]:
        return [row for block in self.blocks() for row in block.rows]


class Frame(Drawn):
    """The lanes while they run and when they are done; never higher than `look.height`."""

    def __init__(
        self,
        panes: Sequence[PaneData],
        look: Look,
        *,
        layout: Layout = "auto",
        comparisons: Sequence[Comparison] = (),
        show_discarded: bool = False,
        notes: bool = True,
        can_continue: bool = True,
    ) -> None:
        self.look, self.body = look, SideBySide(panes, look, layout, show_discarded=show_discarded)
        self.summary = Summary(
            panes, look, comparisons, show_discarded=show_discarded, notes=notes, can_continue=can_continue
        )

    def rows(self) -> list[Row]:
        blocks, height = self.summary.blocks(), self.look.height
        while height is not None and blocks and self._excess(blocks, height) > 0:
            last = max(block.rank for block in blocks)
            blocks = [block for block in blocks if block.rank != last]
        under = [row for block in blocks for row in block.rows]
        return self.body.within(None if height is None else height - len(under)) + under

    def _excess(self, blocks: list[Section], height: int) -> int:
        """Return the rows too many. The lanes' figures go only if the texts would have less than two rows each."""
        figures_only = all(block.rank == 0 for block in blocks)
        texts = min(2 * len(self.body.groups), sum(self.body.needs)) if figures_only else self.body.least
        return sum(len(block.rows) for block in blocks) + texts - height


def look_of(console: Console, settings: Settings) -> Look:
    """Return the look of the screen as it is now: its size, and what settings and terminal allow to be drawn."""
    width, height = console.size
    return Look(
        width=max(20, width),
        height=max(2, height - 1),
        color=console.color_system is not None and not console.no_color,
        ascii=settings.ascii or not (console.encoding or "").lower().startswith("utf"),
        palette=settings.palette,
    )


@dataclass(eq=False)
class Surface:
    """Where answers are shown. `live`: there is a terminal to draw on; `touring`: a tour, which leaves out the plain
    text above the panes; `can_continue`: the user can type /continue. Text is printed literally."""

    settings: Settings
    out: Console
    live: bool = False
    stop: Interrupts = field(default_factory=Interrupts)
    touring: bool = False
    can_continue: bool = False

    @property
    def look(self) -> Look:
        """The screen as it is now; see :func:`look_of`."""
        return look_of(self.out, self.settings)

    def say(self, *contents: RenderableType) -> None:
        for content in contents:
            self.out.print(content)

    def hint(self, text: str) -> None:
        """Say a line that matters less; --quiet leaves it out."""
        if not self.settings.quiet:
            self.out.print(text, style="dim")


def question(text: str, look: Look) -> Text:
    """Return a message as it was typed, after the prompt's sign."""
    return Text(f"{look.glyph('prompt')} {visible(text, look.ascii)}", style=look.style("question") or "")
