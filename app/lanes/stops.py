"""Stop strings: an answer ends before the first of them that its text holds.

A filter over one lane's events, so text, figures, conversation and cache (which goes back to the conversation's ids)
all see the same end, whatever was drafted past it. Tokens are looked at one by one, so rounds of any length give the
same text. Rounds whose text may be the beginning of a stop string wait until that is known.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sampling.events import Event, Finished, Step
from utils.growing_text import Decode, Window
from utils.ordinary_text import continued_ids


@dataclass(frozen=True)
class StopStrings:
    """The texts that end an answer, and a tokenizer's ways between ids and text."""

    texts: tuple[str, ...]
    decode: Decode
    encode: Callable[[str], list[int]]

    def over(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield the events up to the end of the answer; at a stop string the reason is "stop"."""
        try:
            yield from self._cut(events)
        finally:
            getattr(events, "close", lambda: None)()

    def _cut(self, events: Iterator[Event]) -> Iterator[Event]:
        window, text, ends, held = Window(self.decode), "", [0], list[Step]()
        released = 0  # tokens of the rounds that were yielded
        for event in events:
            if not isinstance(event, Step):
                yield from held
                yield event
                held = []
                continue
            held.append(event)
            for token in event.emitted:
                text += window.push(token)
                ends.append(len(text))
                if (start := self._start(text, ends[-2])) is not None:
                    yield from self._last(held, text, ends, start, released)
                    yield Finished(event.row, "stop")
                    return
            if not (self._begins(text) or ends[-1] == ends[max(0, len(ends) - 2)]):
                yield from held
                held, released = [], len(ends) - 1

    def _start(self, text: str, before: int) -> int | None:
        """Return where the first stop string begins of those that end after `before` characters."""
        starts = (text.find(stop, max(0, before - len(stop) + 1)) for stop in self.texts)
        return min((start for start in starts if start >= 0), default=None)

    def _begins(self, text: str) -> bool:
        """Return whether the text ends with the beginning of a stop string."""
        return any(text.endswith(stop[:count]) for stop in self.texts for count in range(1, len(stop)))

    def _last(self, steps: list[Step], text: str, ends: list[int], start: int, before: int) -> Iterator[Step]:
        """Yield the rounds that wait, after `before` tokens, up to character `start`; a token that goes past it is
        replaced by the ids of its beginning."""
        count = ends.index(max(end for end in ends if end <= start))
        rest = continued_ids(text[ends[count] : start], self.encode) if ends[count] < start else []
        left = count - before
        for index, step in enumerate(steps):
            kept, size = max(0, min(left, len(step.emitted))), len(step.emitted)
            own = rest if left < size or index == len(steps) - 1 else []
            left -= kept
            yield _shortened(step, kept, own[0] if own else None)
            yield from (_added(step, token) for token in own[1:])
            rest = [] if own else rest


def _shortened(step: Step, kept: int, token: int | None) -> Step:
    """Return a round with its first `kept` tokens and then `token`, whatever it cost."""
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
    nothing = dict.fromkeys(("drafted", "parents", "source", "path", "target_p", "draft_p", "calls"), ())
    seconds = dict.fromkeys(("draft_s", "verify_s", "sample_s"), 0.0)
    return Step(step.row, gamma=0, token=token, top2_gap=None, **nothing, **seconds)  # type: ignore[arg-type]
