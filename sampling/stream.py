"""Streams: the text that each round added to the answer of each prompt, with the round's figures.

The given tokenizer makes the texts. Knows no models and no drafters; it reads events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sampling.events import Event, Finished, Prefill, Reason, Step
from utils.growing_text import Decode, Window


@dataclass(frozen=True, slots=True)
class Piece:
    """Ids that a round appended to a prompt's answer: either accepted drafts or the target's own token.

    Args:
        row: the prompt's index in the batch.
        text: the text that is complete by now: "" inside a character of several tokens, or without a tokenizer.
        ids: the new ids, a stop id among them. The last piece of a row has none.
        from_draft: a drafter proposed them.
        round: drafts, acceptance, probabilities and seconds; None in the last piece.
        reason: in the last piece of a row, its reason to end: "eos", "length" or "interrupted".
    """

    row: int
    text: str
    ids: tuple[int, ...] = ()
    from_draft: bool = False
    round: Step | None = None
    reason: Reason | None = None


def decode_of(tokenizer: Any) -> Decode:
    """Return ids → text: special tokens are left out, spaces stay as generated."""
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def pieces(events: Iterable[Event], decode: Decode | None) -> Iterator[Piece]:
    """Yield the pieces of a run; the texts of a row, joined, are `decode` of its ids."""
    windows: dict[int, Window] = {}
    for event in events:
        if isinstance(event, Prefill):
            continue
        row: int = event.row
        window = windows.setdefault(row, Window(decode or (lambda ids: "")))
        if isinstance(event, Finished):
            yield Piece(row, window.rest(), reason=event.reason)
        elif isinstance(event, Step):
            own = () if event.token is None else (event.token,)
            for ids, drafted in ((event.accepted, True), (own, False)):
                if ids:
                    yield Piece(row, "".join(map(window.push, ids)), ids, drafted, event)
