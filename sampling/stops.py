"""Stop strings: an answer ends before the first of them that its text holds.

A filter over the events of a run, so text, figures, conversation and cache (which goes back to the conversation's ids)
all see the same end, whatever was drafted past it. Tokens are looked at one by one, so rounds of any length give the
same text. Rounds whose text may be the beginning of a stop string wait until that is known, and so do rounds whose last
token adds no text yet (a part of a character). Knows text only by a tokenizer's two functions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from sampling.events import Event, Finished, Prefill, Step
from utils.growing_text import Decode, Window
from utils.ordinary_text import continued_ids


@dataclass(frozen=True)
class StopStrings:
    """The texts that end an answer, and a tokenizer's ways between ids and text."""

    texts: tuple[str, ...]
    decode: Decode
    encode: Callable[[str], list[int]]

    def over(self, events: Iterator[Event], count: int = 1) -> Iterator[Event]:
        """Yield the events of `count` rows, of each up to the end of its answer; at a stop string the reason is
        "stop"."""
        rows, ended = defaultdict[int, _Row](lambda: _Row(self)), set[int]()
        try:
            for event in events:
                if isinstance(event, Prefill):
                    yield event
                elif event.row not in ended:
                    for kept in rows[event.row].feed(event):
                        ended |= {event.row} if isinstance(kept, Finished) else set()
                        yield kept
                    if len(ended) == count:
                        return
        finally:
            getattr(events, "close", lambda: None)()


def begins(text: str, stops: Iterable[str]) -> bool:
    """Return whether the text ends with the beginning of one of these."""
    return any(text.endswith(stop[:count]) for stop in stops for count in range(1, len(stop)))


class _Row:
    """One row's text so far, and its rounds that wait."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops, self._window = stops, Window(stops.decode)
        self._text, self._ends = "", [0]
        self._held = list[Step]()
        self._released = 0  # tokens of the rounds that were yielded

    def feed(self, event: Event) -> list[Event]:
        """Return the events that can be yielded after one more."""
        if not isinstance(event, Step):
            return [*self._held, event]
        self._held.append(event)
        for token in event.emitted:
            self._text += self._window.push(token)
            self._ends.append(len(self._text))
            if (start := self._start(self._ends[-2])) is not None:
                return [*self._last(start), Finished(event.row, "stop")]
        if begins(self._text, self._stops.texts) or self._ends[-1] == self._ends[max(0, len(self._ends) - 2)]:
            return []
        held, self._held, self._released = self._held, [], len(self._ends) - 1
        return [*held]

    def _start(self, before: int) -> int | None:
        """Return where the first stop string begins of those that end after `before` characters."""
        starts = (self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops.texts)
        return min((start for start in starts if start >= 0), default=None)

    def _last(self, start: int) -> Iterator[Step]:
        """Yield the rounds that wait, up to character `start`; a token that goes past it is replaced by the ids of its
        beginning."""
        text, ends, steps = self._text, self._ends, self._held
        count = ends.index(max(end for end in ends if end <= start))
        rest = continued_ids(text[ends[count] : start], self._stops.encode) if ends[count] < start else []
        left = count - self._released
        for index, step in enumerate(steps):
            kept, size = max(0, min(left, len(step.emitted))), len(step.emitted)
            own = rest if left < size or index == len(steps) - 1 else []
            left -= kept
            yield _shortened(step, kept, own[0] if own else None)
            yield from (_added(step, token) for token in own[1:])
            rest = [] if own else rest


def _shortened(step: Step, kept: int, token: int | None) -> Step:
    """Return a round with only its first `kept` tokens and then `token`; its costs stay."""
    if kept == len(step.emitted) and token is None:
        return step
    path = step.path[:kept]
    return replace(
        step,
        path=path,
        token=step.token if kept > len(path) else token,
        target_p=step.target_p[: len(path)],
        draft_p=step.draft_p[: len(path)],
        positions=step.positions[:kept],
        trials=tuple(trial for trial in step.trials if trial.node in path),
    )


def _added(step: Step, token: int) -> Step:
    """Return a round without a pass that adds one token."""
    return Step(
        row=step.row,
        gamma=0,
        drafted=(),
        parents=(),
        source=(),
        path=(),
        token=token,
        target_p=(),
        draft_p=(),
        top2_gap=None,
        calls=(),
        draft_s=0.0,
        verify_s=0.0,
        sample_s=0.0,
    )
