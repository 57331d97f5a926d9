"""Events and a tokenizer's `decode` → coloured text: which words were drafted, refused or the target's own.

Text comes by difference of decoded prefixes over a bounded window of tokens, so leading spaces and
characters split over several tokens come out right, at a cost per event that does not grow with the
answer. Knows no models, no torch, no colours and no screen; control characters pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sampling.events import Event, Finished, Step

Kind = Literal["accepted", "rejected", "discarded", "target", "plain"]
Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"  # what decode() yields for bytes that are no character (yet)
NO_TEXT = "∎"  # stands for a refused token without text: a stop or another special token

_CONTEXT = 8  # tokens before the newest ones that decode() sees as context
_WINDOW = 24  # the window slides when it is longer than this
_WAITING = 12  # more waiting tokens than any character has bytes: they are garbage, let them go


@dataclass(frozen=True, slots=True)
class Span:
    """A run of text of one kind; `source` says which of the drafter's `names` proposed it."""

    text: str
    kind: Kind
    source: int = 0

    @property
    def committed(self) -> bool:
        """Whether the text is part of the answer (rejected and discarded drafts are not)."""
        return self.kind not in ("rejected", "discarded")


def committed_text(spans: Iterable[Span]) -> str:
    """The answer that the spans make, without rejected and discarded drafts."""
    return "".join(span.text for span in spans if span.committed)


class Window:
    """Text of a growing token sequence, token by token. `base` is the text already handed out."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-_WINDOW:])
        self._settled = len(self._ids)  # tokens whose text is complete
        self._base = decode(self._ids).rstrip(REPLACEMENT) if self._ids else ""

    def _beyond(self, text: str) -> str | None:
        """What `text` adds to the text handed out; None while an earlier part of it may still change."""
        return text[len(self._base) :] if text.startswith(self._base) else None

    def push(self, token: int) -> str:
        """Commit a token; returns the text that is complete now (often "" inside a character)."""
        self._ids.append(token)
        text = self._decode(self._ids)
        new = self._beyond(text)
        if new is None:
            return ""
        if len(self._ids) - self._settled > _WAITING and text.endswith(REPLACEMENT):
            return self._let_go(text)
        whole = new.rstrip(REPLACEMENT)
        self._base += whole
        if whole == new:
            self._settled = len(self._ids)
            self._slide()
        return whole

    def _let_go(self, text: str) -> str:
        """Hand out garbage up to a cut that cannot fall inside a character: the halves read like the whole."""
        for cut in range(len(self._ids) - 4, self._settled, -1):
            head = self._decode(self._ids[:cut])
            if len(head) > len(self._base) and head + self._decode(self._ids[cut:]) == text:
                new = self._beyond(head) or ""
                self._ids = self._ids[cut:]
                self._settled, self._base = 0, ""
                return new
        return ""

    def _slide(self) -> None:
        if len(self._ids) > _WINDOW:
            self._ids = self._ids[-_CONTEXT:]
            self._settled = len(self._ids)
            self._base = self._decode(self._ids)

    def ahead(self, tokens: Iterable[int]) -> list[str]:
        """What further tokens would read like, one text each, without committing them."""
        texts, ids, base = [], list(self._ids), self._base
        for token in tokens:
            ids.append(token)
            text = self._decode(ids)
            new = text[len(base) :] if text.startswith(base) else REPLACEMENT
            whole = new.rstrip(REPLACEMENT)
            base += whole
            texts.append(whole + REPLACEMENT if whole != new else whole or NO_TEXT)
        return texts


class Spanner:
    """Turns a lane's events into spans.

    `decode` is the tokenizer's (special tokens skipped, no clean-up of spaces). With `drafting` the
    target's own tokens are "target", without they are "plain". `context` holds ids that came before
    and are on the screen already (an answer that is continued). The committed spans of a finished
    row, joined, are exactly `decode(ids)` (with a context: what it adds to the context's text).
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
            self._commit(step.token, self._own)

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


def common(one: str, other: str) -> int:
    """The length of the longest common prefix."""
    parting = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(parting, min(len(one), len(other)))


def _source(step: Step, node: int) -> int:
    return step.source[node] if node < len(step.source) else 0
