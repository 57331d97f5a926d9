"""A model of another vocabulary as an LM of the target's ids (Timor et al., "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202).

A :class:`Vocabulary` says which bytes an id adds to a text and which ids spell bytes; what a text is nobody here knows.
:class:`Spelling` keeps what a row of the target's ids is in the model's own, token by token and back again.
Token-level intersection: the session's logits are of the ids that both have, the reduced vocabulary of a
:class:`TranslatedSession`, so its distributions are the model's, restricted and renormalised. Any distribution that
drafts are drawn from is exact. The other way of that paper, to draft freely and write the draft anew in the target's
tokens, is :class:`sampling.drafters.draft_model.RespelledDrafter`'s, on the same session. Knows no acceptance.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sampling.models.causal import CausalLM
from sampling.rows import common_prefix, parted
from sampling.types import LM, Draft, Hidden, Rows, Session
from sampling.vocabulary import spread
from utils.timing import Stopwatch

CHUNK = 24  # bytes behind which a space begins a chunk that is encoded by itself
LONGEST = 256  # bytes of a chunk without such a space
LEAST = 0.75  # of a sample's tokens must be the drafter's own for drafts to be made of shared ids
_SPACE = b" \t\n\r"


class Vocabulary(Protocol):
    """One side's tokens. What joins pieces of a text to ids and back is behind it."""

    by_bytes: dict[bytes, int]  # the one id for these bytes; no special token
    special: dict[str, int]  # special tokens by name, and by role ("eos", "bos") where they have one
    lead: bytes  # what its tokenizer puts before a text
    begin: tuple[int, ...]  # the ids that its texts begin with

    def spelled(self, token: int) -> bytes: ...  # what the id adds to a text; of a special token its name
    def ids(self, text: bytes) -> list[int]: ...  # ids that spell these bytes, as far as any do; no special ones


@dataclass(frozen=True)
class Translation:
    """What a target's vocabulary and a drafter's have in common.

    `ours`, `theirs` [n]: the ids that both have, the target's ascending. `mates`: the target's special tokens that the
    drafter has. Of a sample text: `tokens` of the target's in it, `own` the share of them that are the drafter's own
    tokens there, `spelled` the share of its bytes that the drafter can spell, `ratio` the drafter's tokens for one of
    the target's, `seconds` a token's translation.
    """

    target: Vocabulary
    drafter: Vocabulary
    ours: Tensor
    theirs: Tensor
    mates: Mapping[int, int]
    tokens: int = 0
    own: float = 1.0
    spelled: float = 1.0
    ratio: float = 1.0
    seconds: float = 0.0

    @staticmethod
    def of(target: Vocabulary, drafter: Vocabulary, sizes: tuple[int, int], sample: bytes = b"") -> Translation:
        """Of vocabularies of which the models have the first `sizes` ids."""
        mates: dict[int, int] = {}
        for name, token in target.special.items():  # names come before roles
            if name in drafter.special:
                mates.setdefault(token, drafter.special[name])
        pairs = {
            drafter.by_bytes[one]: target.by_bytes[one] for one in target.by_bytes.keys() & drafter.by_bytes.keys()
        }
        for token, mate in mates.items():
            pairs.setdefault(mate, token)
        fitting = sorted((ours, theirs) for theirs, ours in pairs.items() if ours < sizes[0] and theirs < sizes[1])
        ours, theirs = torch.tensor(fitting, dtype=torch.long).view(-1, 2).unbind(1)
        found = Translation(target, drafter, ours.contiguous(), theirs.contiguous(), mates)
        return found if not sample else found.measured(sample)

    def measured(self, sample: bytes) -> Translation:
        """The same with what a sample text shares."""
        ids, spelling, watch = self.target.ids(sample), Spelling(self), Stopwatch(None)
        for count in range(1, len(ids) + 1):
            theirs = spelling.of(ids[:count])
        seconds, lead = watch.lap(), len(self.drafter.lead)
        own = _spans(self.drafter, theirs[len(self.drafter.begin) :], -lead)
        spans = _spans(self.target, ids, 0)
        return replace(
            self,
            tokens=len(ids),
            own=len({*own} & {*spans}) / len(ids),
            spelled=(own[-1][1] + lead) / (len(sample) + lead),
            ratio=len(own) / len(ids),
            seconds=seconds / len(ids),
        )

    @property
    def by_text(self) -> bool:
        """Whether drafts are better written anew in the target's tokens than made of shared ids."""
        return self.own < LEAST


def _spans(vocabulary: Vocabulary, ids: list[int], at: int) -> list[tuple[int, int]]:
    """(first byte, byte behind it) of each id, the first at byte `at`."""
    return [(at, at := at + len(vocabulary.spelled(token))) for token in ids]


class Spelling:
    """What a growing row of the target's ids is in the drafter's.

    The bytes of the row are cut into chunks, each encoded by itself: before a space behind CHUNK bytes, before and
    behind a special token that both have, and at a character behind LONGEST bytes. Where chunks begin depends on the
    row alone, so the ids do too, whatever was drafted and taken back in between; and only the last chunk of a
    row that grows is encoded again.
    """

    def __init__(self, translation: Translation) -> None:
        self._by = translation
        self._row: list[int] = []
        self._text = bytearray(translation.drafter.lead)
        self._ends: list[int] = []  # bytes behind each id of the row
        self._ids: list[int] = list(translation.drafter.begin)  # of closed chunks
        self._chunks = [(len(self._ids), 0, True)]  # ids before it, its first byte, whether it begins at a special one

    def of(self, row: list[int]) -> list[int]:
        """The drafter's ids that spell `row`; at least one."""
        shared = common_prefix(self._row, row)
        if shared < len(self._row):
            self._cut(shared)
        for token in row[shared:]:
            self._append(token)
        count, start, _ = self._chunks[-1]
        found = self._ids[:count] + self._by.drafter.ids(bytes(self._text[start:]))
        return found or [self._by.drafter.special.get("bos", self._by.drafter.special.get("eos", 0))]

    def covered(self, count: int) -> int:
        """How many ids of the row the first `count` ids of the drafter's spell at least."""
        place = bisect_right(self._chunks, (count, len(self._text) + 1, True)) - 1
        return 0 if place < 0 else bisect_right(self._ends, self._chunks[place][1])

    def __deepcopy__(self, memo: Any) -> Spelling:
        twin = copy(self)
        for name in ("_row", "_text", "_ends", "_ids", "_chunks"):
            setattr(twin, name, copy(getattr(self, name)))
        return twin

    def _cut(self, count: int) -> None:
        """Go back to the first `count` ids of the row."""
        del self._row[count:], self._ends[count:]
        length = self._ends[-1] if self._ends else len(self._by.drafter.lead)
        del self._text[length:]
        while len(self._chunks) > 1 and (
            self._chunks[-1][1] > length or (self._chunks[-1][1] == length and not self._chunks[-1][2])
        ):
            self._chunks.pop()
        del self._ids[self._chunks[-1][0] :]

    def _append(self, token: int) -> None:
        mate, added = self._by.mates.get(token), self._by.target.spelled(token)
        self._row.append(token)
        if mate is not None:
            if len(self._text) > self._chunks[-1][1]:
                self._close(len(self._text))
            if not (len(self._row) == 1 and (mate,) == self._by.drafter.begin):  # its texts begin with it already
                self._ids.append(mate)
            self._text += added
            self._chunks.append((len(self._ids), len(self._text), True))
        else:
            for byte in added:
                length = len(self._text) - self._chunks[-1][1]
                spaced = byte == 0x20 and length >= CHUNK and self._text[-1] not in _SPACE
                if spaced or (length >= LONGEST and (byte & 0xC0 != 0x80 or length >= LONGEST + 4)):
                    self._close(len(self._text))
                self._text.append(byte)
        self._ends.append(len(self._text))

    def _close(self, at: int) -> None:
        """End the open chunk before this byte."""
        self._ids += self._by.drafter.ids(bytes(self._text[self._chunks[-1][1] : at]))
        self._chunks.append((len(self._ids), at, False))


class TranslatedLM(LM):
    """A causal model of another vocabulary, by the target's ids. `size`: how many ids the target has."""

    reviews = False  # a draft's nodes are no tokens of it

    def __init__(self, lm: CausalLM, translation: Translation, size: int) -> None:
        self.lm, self.translation, self.vocab_size = lm, translation, size
        self.name, self.device, self.network = lm.name, lm.device, lm.network
        self.context, self.takes_trees = 1 << 30, False  # what outgrows its own is forgotten

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> TranslatedSession:
        """A session for `prompt`, in the target's ids; what `previous` has in common with it is kept."""
        size = self.vocab_size if target is None else target.vocab_size
        known = previous if isinstance(previous, TranslatedSession) and previous.rows == len(prompt) else None
        return TranslatedSession(self, prompt, size, known)


class TranslatedSession(Session):
    """B rows of the target's ids; `inner` is the model's session of the same rows in its own.

    `reduced_ids` [n]: the target's ids that the model has too. What outgrows the model's context is forgotten from its
    beginning, half a context at a time.
    """

    def __init__(self, lm: TranslatedLM, prompt: Rows, size: int, previous: TranslatedSession | None) -> None:
        self.lm, self.initial, self.device, self.rows = lm, prompt, lm.device, len(prompt)
        by = lm.translation
        count = int((by.ours < size).sum())
        self.vocab_size = size
        self.reduced_ids: Tensor | None = by.ours[:count].to(lm.device)
        self._columns = by.theirs[:count].to(lm.device)
        self._spellings: list[Spelling] = [Spelling(by) for _ in prompt] if previous is None else previous._spellings
        self.inner: Any = lm.lm.open(self.own(prompt), previous=None if previous is None else previous.inner)

    @property
    def takes_trees(self) -> bool:
        return False

    def own(self, rows: Rows) -> Rows:
        """The rows in the model's ids, as much of their ends as its context holds with room for more."""
        return [self.fitted(one.of(row)) for one, row in zip(self._spellings, rows, strict=True)]

    def fitted(self, ids: list[int]) -> list[int]:
        """Ids of the model's, without as many halves of its context as it takes to leave room for one more."""
        half = max(1, self.lm.context // 2)
        over = len(ids) + 1 - self.lm.context
        return ids if over <= 0 else ids[-(-over // half) * half :]

    def rollback(self, rows: Rows) -> list[int]:
        """As any session's; of each row at least so many of the target's ids are cached."""
        held = self.inner.rollback(self.own(rows))
        return [one.covered(count) for one, count in zip(self._spellings, held, strict=True)]

    def score_own(self, rows: Rows) -> Tensor:
        """[B, V of the model] its logits behind rows of its own ids."""
        found: Tensor = self.inner.score(rows, Draft.empty(len(rows)))[:, 0]
        return found

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, 1, n] logits of the ids in `reduced_ids`. ValueError for a draft that is not empty."""
        if draft.tokens.shape[1]:
            raise ValueError("a model of another vocabulary scores no drafts of the target's tokens")
        return self.score_own(self.own(rows)).index_select(1, self._columns)[:, None]

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, 1, V]; -inf for what the model has no token for."""
        return spread(self.score_reduced(rows, draft), self.reduced_ids, self.vocab_size, -torch.inf)

    def commit(self, path: Tensor) -> None:
        self.inner.commit(path[:, :0])

    def select(self, rows: Tensor) -> None:
        self._spellings, self.rows = parted(self._spellings, rows.tolist()), len(rows)
        self.inner.select(rows)

    def kv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """ValueError: its keys and values are of other tokens."""
        raise ValueError("a model of another vocabulary has no keys and values of the target's tokens")

    def hidden(self, wanted: tuple[int, ...] = ()) -> Tensor:
        """ValueError: its states are of other tokens."""
        raise ValueError("a model of another vocabulary has no hidden states of the target's tokens")

    def fork(self) -> TranslatedSession:
        twin = copy(self)
        twin._spellings, twin.inner = deepcopy(self._spellings), self.inner.fork()
        return twin
