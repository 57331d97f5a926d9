"""A model of another vocabulary as an LM of the target's ids (Timor et al., "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202).

A :class:`TokenBytes` says which bytes an id adds to a text and which ids spell bytes. :class:`Spelling` translates a
growing row of the target's ids into the model's own. Token-level intersection: the session's logits are of the ids that
both have, the reduced vocabulary of a :class:`TranslatedSession`, so its distributions are the model's, restricted and
renormalised. Drafts may be drawn from any distribution without changing the text's. The paper's other way, to draft
freely and to spell the draft in the target's tokens, is :class:`sampling.drafters.draft_model.Respelled`, on the same
session. Knows no acceptance.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sampling.models.causal import CausalLM
from sampling.rows import common_prefix, parted
from sampling.types import LM, Draft, Hidden, Rows, Session
from sampling.vocabulary import spread
from utils.loading.fit import TokenBytes
from utils.timing import Stopwatch

CHUNK = 24  # bytes after which a space begins a new chunk
LONGEST = 256  # bytes of a chunk without such a space
LEAST = 0.75  # share of a sample's tokens that must be the drafter's own for drafts of shared ids


@dataclass(frozen=True)
class Translation:
    """The common part of a target's vocabulary and a drafter's.

    `ours`, `theirs` [n]: the target's and the drafter's ids of the tokens that both have, the target's ascending.
    `mates`: the target's special tokens that the drafter has too → the drafter's ids. Of a sample text: `tokens` the
    number of the target's tokens, `own` the share of them that are tokens of the drafter's too, `spelled` the share of
    the bytes that the drafter can spell, `ratio` the drafter's tokens for one of the target's, `seconds` to translate a
    token.
    """

    target: TokenBytes
    drafter: TokenBytes
    ours: Tensor
    theirs: Tensor
    mates: Mapping[int, int]
    tokens: int = 0
    own: float = 1.0
    spelled: float = 1.0
    ratio: float = 1.0
    seconds: float = 0.0

    @staticmethod
    def of(target: TokenBytes, drafter: TokenBytes, sizes: tuple[int, int], sample: bytes = b"") -> Translation:
        """Return the translation between a target and a drafter whose models have the first `sizes` ids."""
        mates: dict[int, int] = {}
        for name, token in target.special.items():  # names of tokens come before roles such as "eos"
            if name in drafter.special:
                mates.setdefault(token, drafter.special[name])
        common = target.by_bytes.keys() & drafter.by_bytes.keys()
        pairs = {mate: token for token, mate in reversed(mates.items())}  # the first of several tokens counts
        pairs |= {drafter.by_bytes[text]: target.by_bytes[text] for text in common}
        fitting = sorted((ours, theirs) for theirs, ours in pairs.items() if ours < sizes[0] and theirs < sizes[1])
        ours, theirs = torch.tensor(fitting, dtype=torch.long).view(-1, 2).unbind(1)
        translation = Translation(target, drafter, ours.contiguous(), theirs.contiguous(), mates)
        return translation.measured(sample) if sample else translation

    def measured(self, sample: bytes) -> Translation:
        """Return this translation with the figures of a sample text."""
        ids, spelling, watch = self.target.ids(sample), Spelling(self), Stopwatch(None)
        for count in range(1, len(ids) + 1):
            theirs = spelling.of(ids[:count])
        seconds, lead = watch.lap(), len(self.drafter.lead)
        own = _spans(self.drafter, theirs[len(self.drafter.begin) :], -lead)
        return replace(
            self,
            tokens=len(ids),
            own=len({*own} & {*_spans(self.target, ids, 0)}) / len(ids),
            spelled=(own[-1][1] + lead) / (len(sample) + lead),
            ratio=len(own) / len(ids),
            seconds=seconds / len(ids),
        )

    @property
    def by_text(self) -> bool:
        """Whether spelling drafts in the target's tokens is better than drafting shared ids."""
        return self.own < LEAST


def _spans(vocabulary: TokenBytes, ids: list[int], at: int) -> list[tuple[int, int]]:
    """(first byte, byte after the last) of each id, the first id at byte `at`."""
    return [(at, at := at + len(vocabulary.spelled(token))) for token in ids]


class Spelling:
    """The drafter's ids of a growing row of the target's ids.

    The bytes of the row are cut into chunks that are encoded separately: before a space after CHUNK bytes, before and
    after a special token that both have, and at a character after LONGEST bytes. The cuts depend on the row alone, so
    the ids do too, whatever was drafted and rejected; and only the last chunk of a growing row is encoded again.
    """

    def __init__(self, translation: Translation) -> None:
        self._by = translation
        self._row: list[int] = []
        self._text = bytearray(translation.drafter.lead)
        self._ends: list[int] = []  # the row's bytes up to the end of each id
        self._ids: list[int] = list(translation.drafter.begin)  # of closed chunks
        self._chunks = [(len(self._ids), 0, True)]  # ids before it, its first byte, whether it follows a special token

    def of(self, row: list[int]) -> list[int]:
        """The drafter's ids that spell `row`; at least one."""
        shared = common_prefix(self._row, row)
        if shared < len(self._row):
            self._cut(shared)
        for token in row[shared:]:
            self._append(token)
        count, start, _ = self._chunks[-1]
        ids = self._ids[:count] + self._by.drafter.ids(bytes(self._text[start:]))
        return ids or [self._by.drafter.special.get("bos", self._by.drafter.special.get("eos", 0))]

    def covered(self, count: int) -> int:
        """The least number of the row's ids that the drafter's first `count` ids spell."""
        chunk = bisect_right(self._chunks, (count, len(self._text) + 1, True)) - 1
        return 0 if chunk < 0 else bisect_right(self._ends, self._chunks[chunk][1])

    def __deepcopy__(self, memo: dict[int, object]) -> Spelling:
        twin = copy(self)
        vars(twin).update({name: copy(part) for name, part in vars(self).items() if part is not self._by})
        return twin

    def _cut(self, count: int) -> None:
        """Keep the first `count` ids of the row."""
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
            if not (len(self._row) == 1 and (mate,) == self._by.drafter.begin):  # else `_ids` begins with it already
                self._ids.append(mate)
            self._text += added
            self._chunks.append((len(self._ids), len(self._text), True))
        else:
            for byte in added:
                length = len(self._text) - self._chunks[-1][1]
                spaced = byte == 0x20 and length >= CHUNK and self._text[-1] not in b" \t\n\r"
                if spaced or (length >= LONGEST and (byte & 0xC0 != 0x80 or length >= LONGEST + 4)):
                    self._close(len(self._text))
                self._text.append(byte)
        self._ends.append(len(self._text))

    def _close(self, at: int) -> None:
        """End the open chunk before this byte."""
        self._ids += self._by.drafter.ids(bytes(self._text[self._chunks[-1][1] : at]))
        self._chunks.append((len(self._ids), at, False))


class TranslatedLM(LM):
    """A causal model of another vocabulary in the target's ids. `size`: the number of the target's ids."""

    reviews = False  # a draft consists of the target's tokens, which are not this model's

    def __init__(self, lm: CausalLM, translation: Translation, size: int) -> None:
        self.lm, self.translation, self.vocab_size = lm, translation, size
        self.name, self.device, self.network = lm.name, lm.device, lm.network
        self.context, self.takes_trees = 1 << 30, False  # the session cuts rows to the model's own context

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> TranslatedSession:
        """A session for `prompt`, in the target's ids; it keeps the common prefix with `previous`."""
        known = previous if isinstance(previous, TranslatedSession) and previous.rows == len(prompt) else None
        return TranslatedSession(self, prompt, self.vocab_size if target is None else target.vocab_size, known)


class TranslatedSession(Session):
    """B rows of the target's ids; `inner` is the model's session of the same rows in its own ids.

    `reduced_ids` [n]: the target's ids that the model has too. A row longer than the model's context loses its
    beginning, half a context at a time.
    """

    described = "a model of another vocabulary"
    takes_trees = False

    def __init__(self, lm: TranslatedLM, prompt: Rows, size: int, previous: TranslatedSession | None) -> None:
        self.lm, self.initial, self.device, self.rows = lm, prompt, lm.device, len(prompt)
        by = lm.translation
        count = int((by.ours < size).sum())
        self.vocab_size = size
        self.reduced_ids: Tensor | None = by.ours[:count].to(lm.device)
        self._columns = by.theirs[:count].to(lm.device)
        self._spellings: list[Spelling] = [Spelling(by) for _ in prompt] if previous is None else previous._spellings
        self.inner: Session = lm.lm.open(self.own(prompt), previous=None if previous is None else previous.inner)

    def own(self, rows: Rows) -> Rows:
        """Return the rows in the model's ids, without their beginnings where they are too long."""
        return [self.fitted(spelling.of(row)) for spelling, row in zip(self._spellings, rows, strict=True)]

    def fitted(self, ids: list[int]) -> list[int]:
        """Return the model's `ids`, without as many half contexts at the beginning as leave room for one more token."""
        half = max(1, self.lm.context // 2)
        over = len(ids) + 1 - self.lm.context
        return ids if over <= 0 else ids[-(-over // half) * half :]

    def rollback(self, rows: Rows) -> list[int]:
        """Crop to the common prefix with `rows`; at least this many of the target's ids are cached of each row."""
        held = self.inner.rollback(self.own(rows))
        return [spelling.covered(count) for spelling, count in zip(self._spellings, held, strict=True)]

    def score_own(self, rows: Rows) -> Tensor:
        """Return the model's logits [B, V of the model] after rows in the model's ids."""
        return self.inner.score(rows, Draft.empty(len(rows)))[:, 0]

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, 1, n] logits of the ids in `reduced_ids`. ValueError for a draft that is not empty."""
        if draft.width:
            raise ValueError("a model of another vocabulary scores no drafts of the target's tokens")
        return self.score_own(self.own(rows)).index_select(1, self._columns)[:, None]

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, 1, V] logits; -inf for ids that the model does not have."""
        return spread(self.score_reduced(rows, draft), self.reduced_ids, self.vocab_size, -torch.inf)

    def commit(self, path: Rows) -> None:
        self.inner.commit([[] for _ in path])

    def select(self, rows: Tensor) -> None:
        self._spellings, self.rows = parted(self._spellings, rows.tolist()), len(rows)
        self.inner.select(rows)

    def fork(self) -> TranslatedSession:
        twin = copy(self)
        twin._spellings, twin.inner = deepcopy(self._spellings), self.inner.fork()
        return twin
