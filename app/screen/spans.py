"""Events and a tokenizer's `decode` → coloured text: which words were drafted, refused or the target's own.

Text comes by difference of decoded prefixes (utils/growing_text.py). Knows no models, no torch, no colours and no
screen; control characters pass through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sampling.events import BeamStep, BeamTree, Event, Finished, Step
from utils.growing_text import REPLACEMENT, Decode, Window

Kind = Literal["accepted", "rejected", "discarded", "target", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of text of one kind; `source` says which of the drafter's `names` proposed it; `dim`: it is thinking."""

    text: str
    kind: Kind
    source: int = 0
    dim: bool = False

    @property
    def committed(self) -> bool:
        """Whether the text is part of the answer (rejected and discarded drafts are not)."""
        return self.kind not in ("rejected", "discarded")


def committed_text(spans: Iterable[Span]) -> str:
    """The answer that the spans make, without rejected and discarded drafts."""
    return "".join(span.text for span in spans if span.committed)


class Spanner:
    """Turns a lane's events into spans.

    `decode` is the tokenizer's (special tokens skipped, no clean-up of spaces). With `drafting` the
    target's own tokens are "target", or "bonus" behind drafts that were all accepted; without they are "plain".
    `context` holds ids that came before and are on the screen already (an answer that is continued). The committed
    spans of a finished row, joined, are exactly `decode(ids)` (with a context: what it adds to the context's text).
    """

    def __init__(self, decode: Decode, drafting: bool, *, context: Sequence[int] = ()) -> None:
        self.ids: list[int] = []
        self._decode = decode
        self._own: Kind = "target" if drafting else "plain"
        self._context = list(context)
        self._window = Window(decode, context)
        self.spans: list[Span] = []  # so far; characters that are not complete yet are waiting
        self._last: Kind = self._own

    @property
    def text(self) -> str:
        """The answer so far, without rejected and discarded drafts."""
        return committed_text(self.spans)

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
        """The refused draft and what was discarded behind it; of a tree the best branch stands for all."""
        branch = step.branch or (() if step.is_tree else step.discarded)
        texts = self._window.ahead(step.drafted[node] for node in branch)
        for place, (node, text) in enumerate(zip(branch, texts, strict=True)):
            kind: Kind = "rejected" if place == 0 and step.rejected else "discarded"
            self._add(text, kind, _source(step, node))

    def _commit(self, token: int, kind: Kind, source: int = 0) -> None:
        self.ids.append(token)
        self._last = kind
        self._add(self._window.push(token), kind, source)

    def _add(self, text: str, kind: Kind, source: int = 0) -> None:
        if not text:
            return
        if self.spans and (self.spans[-1].kind, self.spans[-1].source) == (kind, source):
            text = self.spans.pop().text + text
        self.spans.append(Span(text, kind, source))

    def _settle(self) -> None:
        """Once, at the end: add what was waiting. Where a tokenizer reads the whole otherwise than its
        parts, the whole holds.
        """
        whole = self._decode([*self._context, *self.ids])
        if self._context:
            whole = whole[len(self._decode(self._context).rstrip(REPLACEMENT)) :]
        if whole == self.text:
            return
        settled: list[Span] = []
        for span in self.spans:
            if not span.committed:
                settled.append(span)
                continue
            same = common(span.text, whole)
            if same:
                settled.append(Span(span.text[:same], span.kind, span.source))
            whole = whole[same:]
            if same < len(span.text):
                break
        self.spans = settled
        self._add(whole, self._last)


class BeamReader:
    """Turns the events of a beam search into the best beam's text; takes the place of :class:`Spanner`.

    Text is joined when it is needed, not at every step: the beam that leads changes as they grow.
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
        """The best beam's text: what it adds to a continued answer."""
        if not (best := self._tree.best).tokens:
            return []
        text = self._decode([*self._context, *best.tokens])[len(self._before) :]
        text = text if best.finished else text.rstrip(REPLACEMENT)  # a character may not be complete yet
        return [Span(text, "plain")] if text else []


def common(one: str, other: str) -> int:
    """The length of the longest common prefix."""
    parting = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(parting, min(len(one), len(other)))


def _source(step: Step, node: int) -> int:
    return step.source[node] if node < len(step.source) else 0
