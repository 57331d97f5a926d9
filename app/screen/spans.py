"""Turns a lane's events into spans of text (accepted drafts, rejected drafts, the target's own tokens), and draws a
finished answer: its Markdown by rich, and the model's thinking as the settings show it.

A token's text is the difference of decoded prefixes (utils/growing_text.py). The thinking stands between the template's
marks: `show` draws it dim, `fold` replaces it by a line, `hide` leaves it out. The answer's ids and text stay the same,
and line breaks stay where the model put them. Knows no models, and nothing of the screen's size.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from app.screen.rows import plural
from app.settings.table import Settings
from sampling.events import BeamStep, BeamTree, Event, Finished, Step
from utils.catalogue.templates import Thinking
from utils.growing_text import REPLACEMENT, Decode, Window
from utils.visible import visible

SpanKind = Literal["accepted", "rejected", "discarded", "target", "bonus", "forced", "differs", "plain"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of text of one kind. `source`: the index of the drafter's source that proposed it; `dim`: it is
    thinking."""

    text: str
    kind: SpanKind
    source: int = 0
    dim: bool = False

    @property
    def committed(self) -> bool:
        """Whether the text is part of the answer (rejected and discarded drafts are not)."""
        return self.kind not in ("rejected", "discarded")


def committed_text(spans: Iterable[Span]) -> str:
    """Return the answer's text: that of the spans without rejected and discarded drafts."""
    return "".join(span.text for span in spans if span.committed)


class Spanner:
    """Turns a lane's events into spans.

    `decode` is the tokenizer's (special tokens skipped, no clean-up of spaces). With `drafting` the target's own tokens
    are "target", or "bonus" after a path of drafts that was accepted to its end; without it they are "plain".
    `context`: ids with which a continued answer begins, on the screen already. The committed spans of a finished row,
    joined, are exactly `decode(ids)` (with a context: the text that the ids add to the context's).
    """

    def __init__(self, decode: Decode, drafting: bool, *, context: Sequence[int] = ()) -> None:
        self.ids: list[int] = []
        self._decode = decode
        self._own: SpanKind = "target" if drafting else "plain"
        self._context = list(context)
        self._window = Window(decode, context)
        self.spans: list[Span] = []  # so far, without characters whose tokens are not complete
        self._last: SpanKind = self._own

    def feed(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Step):
            self._step(event)
        elif isinstance(event, Finished):
            self._settle()

    def _step(self, step: Step) -> None:
        for node in step.path:
            self._commit(step.drafted[node], "accepted", _source(step, node))
        self._refuse(step)
        if step.token is not None:
            bonus = self._own == "target" and step.drafted and not step.rejected
            self._commit(step.token, "bonus" if bonus else self._own)

    def _refuse(self, step: Step) -> None:
        """Add the rejected draft and those discarded after it; of a tree only its best branch."""
        branch = step.branch or (() if step.is_tree else step.discarded)
        texts = self._window.ahead(step.drafted[node] for node in branch)
        for index, (node, text) in enumerate(zip(branch, texts, strict=True)):
            kind: SpanKind = "rejected" if index == 0 and step.rejected else "discarded"
            self._add(text, kind, _source(step, node))

    def _commit(self, token: int, kind: SpanKind, source: int = 0) -> None:
        self.ids.append(token)
        self._last = kind
        self._add(self._window.push(token), kind, source)

    def _add(self, text: str, kind: SpanKind, source: int = 0) -> None:
        if not text:
            return
        if self.spans and (self.spans[-1].kind, self.spans[-1].source) == (kind, source):
            text = self.spans.pop().text + text
        self.spans.append(Span(text, kind, source))

    def _settle(self) -> None:
        """At the end of the row, make the committed spans equal to the decoded ids: add incomplete characters, and take
        the text of all ids where the tokenizer decodes parts of them differently.
        """
        whole = self._decode([*self._context, *self.ids])
        if self._context:
            whole = whole[len(self._decode(self._context).rstrip(REPLACEMENT)) :]
        if whole == committed_text(self.spans):
            return
        settled: list[Span] = []
        for span in self.spans:
            if not span.committed:
                settled.append(span)
                continue
            if same := common(span.text, whole):
                settled.append(Span(span.text[:same], span.kind, span.source))
            whole = whole[same:]
            if same < len(span.text):
                break
        self.spans = settled
        self._add(whole, self._last)


class BeamReader:
    """Turns the events of a beam search into the best beam's text; replaces :class:`Spanner` there.

    The text is decoded when it is read, not at every step, since the best beam changes.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode, self._context = decode, list(context)
        self._before = decode(self._context).rstrip(REPLACEMENT) if self._context else ""
        self._tree = BeamTree()

    def feed(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, BeamStep):
            self._tree.add(event)
        elif isinstance(event, Finished) and event.reason != "interrupted":
            self._tree.close()

    @property
    def spans(self) -> list[Span]:
        """The best beam's text, without that of the context."""
        if not (best := self._tree.best).tokens:
            return []
        text = self._decode([*self._context, *best.tokens])[len(self._before) :]
        text = text if best.finished else text.rstrip(REPLACEMENT)  # a character may not be complete yet
        return [Span(text, "plain")] if text else []


def common(text: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    parting = (index for index, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(parting, min(len(text), len(other)))


def _source(step: Step, node: int) -> int:
    return step.source[node] if node < len(step.source) else 0


SHOW, FOLD, HIDE = "show", "fold", "hide"
_PLAIN = {"paragraph_open", "paragraph_close", "inline", "text", "softbreak", "hardbreak"}


class Thought(NamedTuple):
    """A stretch of thinking in a text, its marks included. `closed`: it has the closing mark; `words`: their number,
    without the marks."""

    start: int
    end: int
    closed: bool
    words: int

    @property
    def line(self) -> str:
        """The line that `fold` shows instead."""
        count = plural(self.words, "word")
        return f"[thought, {count}: /thinking show]" if self.closed else f"[thinking, {count} so far]"


def thoughts(text: str, marks: Thinking, mode: str, before: str = "") -> list[Thought]:
    """Return the thinking in `text`, which follows `before` in the answer; for `hide` with the line breaks after it."""
    said = (marks.open if marks.begun else "") + before
    inside, result, at = said.rfind(marks.open) > said.rfind(marks.close), list[Thought](), 0
    while inside or marks.open in text[at:]:
        start = at if inside else text.index(marks.open, at)
        close, inside = text.find(marks.close, start), False
        at = len(text) if close < 0 else close + len(marks.close)
        words = len(text[start:at].removeprefix(marks.open).removesuffix(marks.close).split())
        if mode == HIDE:
            at = len(text) - len(text[at:].lstrip("\n"))
        result.append(Thought(start, at, close >= 0, words))
    return result


def span_parts(spans: Sequence[Span], stretches: Sequence[Thought], mode: str) -> tuple[Span, ...]:
    """Return the spans of a text with its thinking (`stretches`) as `mode` shows it."""
    parts, folded = list[Span](), set[Thought]()
    for span, at in _cut(spans, [bound for thought in stretches for bound in (thought.start, thought.end)]):
        around = (each for each in stretches if each.start <= at < each.end or (at == each.end and not each.closed))
        if (thought := next(around, None)) is None:
            parts.append(span)
        elif mode == SHOW:
            parts.append(replace(span, dim=True))
        elif mode == FOLD and thought not in folded:
            folded.add(thought)
            parts.append(Span(thought.line, "plain", dim=True))
    return tuple(parts)


def differing(spans: Sequence[Span], other: str) -> tuple[Span, ...]:
    """Return the spans of a text, in which words that differ from `other` have the kind "differs"."""
    words, others = (re.findall(r"\s*\S+|\s+", each) for each in (committed_text(spans), other))
    ends = [0, *accumulate(map(len, words))]
    changes = SequenceMatcher(None, others, words, autojunk=False).get_opcodes()
    parts = [(ends[first], ends[last]) for tag, _, _, first, last in changes if tag != "equal"]
    return tuple(
        replace(span, kind="differs") if span.committed and any(a <= at < b for a, b in parts) else span
        for span, at in _cut(spans, [bound for part in parts for bound in part])
    )


def _cut(spans: Sequence[Span], bounds: Sequence[int]) -> Iterator[tuple[Span, int]]:
    """Yield the spans, cut at these characters of their committed text, and where each begins in it."""
    at = 0
    for span in spans:
        length = len(span.text) if span.committed else 0
        inner = sorted({bound - at for bound in bounds if at < bound < at + length})
        for start, end in pairwise([0, *inner, len(span.text)]):
            yield replace(span, text=span.text[start:end]), at + start
        at += length


def rendered(text: str) -> RenderableType | None:
    """Return the text drawn as Markdown; None if it has no Markdown."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown  # slow to import, and most answers come without

    drawn = Markdown(visible(text), code_theme="ansi_dark", hyperlinks=False)
    # Parsed as rich does, except that HTML is kept as text; rich would leave it out.
    drawn.parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(drawn.markup)
    tokens = [token for block in drawn.parsed for token in (block, *(block.children or ()))]
    if {token.type for token in tokens} <= _PLAIN:
        return None
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
    return drawn


def answer_text(text: str, settings: Settings, *, live: bool, marks: Thinking | None = None) -> RenderableType:
    """Return the answer as it is printed: on a terminal drawn as Markdown if it has any, else as it is. The thinking
    between `marks` is dim, folded to a line, or left out."""
    if marks is not None and (stretches := thoughts(text, marks, settings.thinking)):
        return Group(
            *(
                Text(visible(part.text), style="dim")
                if part.dim
                else answer_text(part.text.strip("\n"), settings, live=live)
                for part in span_parts([Span(text, "plain")], stretches, settings.thinking)
                if part.text.strip()
            )
        )
    return (rendered(text) if live and settings.render and not settings.ascii else None) or Text(visible(text))
