"""LM and Session over causal models. The cache follows by common prefix: `sync` crops it to what
the rows share with it, `score` feeds what is missing and the draft. Knows no sampling and no text.

Layout: after `keep` or `sync` token i of every row lies in slot i (rows of unequal length leave
slots behind their end unused). Only between `score` and `keep` lie new tokens elsewhere.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from sampling.models.cache import Buffer
from sampling.models.masks import additive, places
from sampling.models.network import network_of
from sampling.rows import common_prefix
from sampling.types import LM, Draft, KVCache, Network, Rows, Session
from sampling.vocabulary import spread
from utils.errors import UserError

Own = TypeVar("Own", bound="CausalSession")


class CausalLM(LM):
    """A causal model by name.

    Args:
        model: a transformers causal model, or a :class:`sampling.types.Network`.
        name: how events and figures call it.
        vocab_size: use only the first so many ids (padded vocabularies); the rest has probability 0.
    """

    def __init__(self, model: Any, name: str = "target", vocab_size: int | None = None) -> None:
        self.network = network_of(model)
        self.name = name
        self.vocab_size = min(vocab_size or self.network.vocab_size, self.network.vocab_size)
        self.context, self.device = self.network.context, self.network.device

    @property
    def takes_trees(self) -> bool:
        """Whether drafts for it may be trees."""
        return self.network.takes_trees

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: bool = False
    ) -> CausalSession:
        """A session for `prompt`; it takes over the cache of `previous`, which must not be used again.

        A previous session that keeps hidden states serves where none are asked for, not the other way round.
        """
        self.check(prompt, target)
        if isinstance(previous, CausalSession) and previous.reusable(self.network, len(prompt), hidden):
            previous.initial = prompt
            previous.rollback(prompt)
            return self.beside(previous, target)
        return self.beside(CausalSession(self.network, prompt, self.vocab_size, hidden), target)

    def beside(self, session: Own, target: Session | None) -> Own:
        """`session` with logits of the target's ids; of its own without a target."""
        session.cover(self.vocab_size, self.vocab_size if target is None else target.vocab_size)
        return session

    def check(self, prompt: Rows, target: Session | None = None) -> None:
        """UserError for a prompt without tokens or, where no target has read it, with ids outside the vocabulary."""
        if not prompt or not all(prompt):
            raise UserError("the prompt is empty: give at least one token")
        if target is not None:
            return
        highest, lowest = max(map(max, prompt)), min(map(min, prompt))
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise UserError(f"id {wrong} is outside the vocabulary of {self.name} (0 … {self.vocab_size - 1})")


class CausalSession(Session):
    """B rows of one causal model; satisfies :class:`sampling.types.Session`.

    `short_list` [n] holds those of the `vocab_size` ids, ascending, that the model's head covers; None = all of them.
    An id that the model has no row for is read as its last one.
    """

    def __init__(self, network: Network, prompt: Rows, vocab_size: int, hidden: bool) -> None:
        self.network, self.initial, self.device = network, prompt, network.device
        self.cover(vocab_size, vocab_size)
        self._hidden: Buffer | None = Buffer() if hidden else None
        self._reset(len(prompt))

    def cover(self, own: int, size: int) -> None:
        """Give logits of `size` ids, of which the model has the first `own`."""
        ids, known = getattr(self.network, "short_list", None), min(own, size)
        if ids is None and own < size:
            ids = torch.arange(own, device=self.network.device)
        self.vocab_size = size
        self.short_list = None if ids is None else ids[: int((ids < known).sum())]

    @property
    def takes_trees(self) -> bool:
        return self.network.takes_trees

    def _reset(self, rows: int) -> None:
        self._cache: KVCache = self.network.new_cache(rows)
        if self._hidden is not None:
            self._hidden = Buffer()
        self._tokens: Rows = [[] for _ in range(rows)]  # what the aligned slots hold
        self._nodes: list[list[tuple[int, int]]] | None = None  # (token, slot) of the draft last scored
        self._fed: list[list[int]] = []  # slots of the committed tokens fed with it
        self._chain = True

    def reusable(self, network: Network, rows: int, hidden: bool) -> bool:
        """Whether a session of `network` can go on from this one's cache."""
        return network is self.network and rows == len(self._tokens) and hidden <= self.keeps_hidden

    @property
    def keeps_hidden(self) -> bool:
        """Whether `hidden` can be asked."""
        return self._hidden is not None

    def held(self) -> list[int]:
        """The number of cached tokens of each row, as it stands: nothing is cropped."""
        self._settle()
        return [len(tokens) for tokens in self._tokens]

    # -- following the rows ------------------------------------------------------------------

    def rollback(self, rows: Rows) -> list[int]:
        """Crop to the common prefix with `rows`; the number of cached tokens of each row."""
        self._settle()
        lengths = [common_prefix(cached, row) for cached, row in zip(self._tokens, rows, strict=True)]
        self._crop(lengths)
        return lengths

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, N+1, V] logits behind each row and behind each of its N nodes; feeds what is missing.

        At least the last token of each row is fed. An error in the pass leaves an empty cache.
        """
        return self.widen(self.score_short(rows, draft))

    def widen(self, short: Tensor) -> Tensor:
        """Logits of the short list's ids [..., n] → of all ids [..., V], -inf elsewhere."""
        return spread(short, self.short_list, self.vocab_size, float("-inf"))

    @torch.inference_mode()
    def score_short(self, rows: Rows, draft: Draft) -> Tensor:
        """`score` with the logits of the short list's ids alone, [B, N+1, n]; of all ids if there is none."""
        cached = self.rollback(rows)
        cached = [min(length, len(row) - 1) for length, row in zip(cached, rows, strict=True)]
        self._crop(cached)
        feed = [row[length:] for row, length in zip(rows, cached, strict=True)]
        nodes = draft.tokens.tolist()
        width = max(map(len, feed))
        try:
            logits = self._forward(feed, nodes, draft.parents, width)
        except BaseException:
            self._reset(len(rows))
            raise
        return logits[..., : self.vocab_size if self.short_list is None else len(self.short_list)]

    def _forward(self, feed: Rows, nodes: Rows, parents: Tensor | None, width: int) -> Tensor:
        start, count = self._cache.length, len(nodes[0])
        lengths = [len(tokens) for tokens in self._tokens]
        uniform = len(set(lengths)) == 1 and len(set(map(len, feed))) == 1
        plain = uniform and parents is None and not any(token < 0 for row in nodes for token in row)
        padded = [
            [0] * (width - len(new)) + new + [max(t, 0) for t in row] for new, row in zip(feed, nodes, strict=True)
        ]
        mask = None
        if plain:
            positions = torch.arange(start, start + width + count).expand(len(feed), -1)
        else:
            positions, seen = places(lengths, feed, parents, start, width, count)
            positions = positions.clamp(max=self.network.context - 1)  # absent nodes of a long row
            mask = additive(seen, self.network)
        device = self.network.device
        ids = torch.tensor(padded, device=device).clamp_(max=self.network.vocab_size - 1)
        logits, hidden = self._run(ids, positions.to(device), mask, count + 1)
        if self._hidden is not None and hidden is not None:
            self._hidden.append(hidden[:, None])
        self._note(feed, nodes, start + width, parents is None)
        return logits

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        """The pass itself: logits [B, keep, n or V] and, if kept, states [B, T, H] of ids [B, T]."""
        network: Any = self.network
        forward = network.forward if getattr(network, "short_list", None) is None else network.forward_short
        logits, hidden = forward(ids, positions, mask, self._cache, keep, self._hidden is not None)
        return logits, hidden

    def _note(self, feed: Rows, nodes: Rows, end: int, chain: bool) -> None:
        """Remember which slots the pass has filled: fed tokens end at slot `end`, nodes follow."""
        self._fed = [list(range(end - len(new), end)) for new in feed]
        self._nodes = [[(t, end + place) for place, t in enumerate(row)] for row in nodes]
        self._chain = chain
        for tokens, new in zip(self._tokens, feed, strict=True):
            tokens.extend(new)

    def commit(self, path: Tensor) -> None:
        """Commit these nodes of the draft last scored: [B, A] indices, -1 padded."""
        if self._nodes is None:
            return
        kept = []
        for nodes, row in zip(self._nodes, path.tolist(), strict=True):
            kept.append([nodes[index] for index in row if index >= 0])
        self._settle(kept)

    def _settle(self, kept: list[list[tuple[int, int]]] | None = None) -> None:
        """Bring token i of each row to slot i. Nodes of a chain stay unless `kept` says otherwise."""
        if self._nodes is None:
            return
        if kept is None:
            kept = [[node for node in nodes if node[0] >= 0 and self._chain] for nodes in self._nodes]
        bases = [len(tokens) - len(fed) for tokens, fed in zip(self._tokens, self._fed, strict=True)]
        tails = [fed + [slot for _, slot in nodes] for fed, nodes in zip(self._fed, kept, strict=True)]
        for tokens, nodes in zip(self._tokens, kept, strict=True):
            tokens.extend(token for token, _ in nodes)
        self._nodes = None
        self._arrange(bases, tails)

    def _arrange(self, bases: list[int], tails: list[list[int]]) -> None:
        """Move slots so that row b's tail[i] lands in slot bases[b] + i."""
        length = max(base + len(tail) for base, tail in zip(bases, tails, strict=True))
        moves = [
            (row, slot, base + place)
            for row, (base, tail) in enumerate(zip(bases, tails, strict=True))
            for place, slot in enumerate(tail)
            if slot != base + place
        ]
        if not moves:
            self._each(lambda part: part.crop(length))
            return
        index = torch.tensor(moves).T
        self._each(lambda part: part.shift(index, length))

    def _crop(self, lengths: list[int]) -> None:
        for tokens, length in zip(self._tokens, lengths, strict=True):
            del tokens[length:]
        self._each(lambda part: part.crop(max(lengths)))

    @torch.inference_mode()
    def _each(self, act: Any) -> None:
        act(self._cache)
        if self._hidden is not None:
            act(self._hidden)

    # -- rows, copies and what others read -----------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Keep, reorder or repeat rows: [B'] indices."""
        self._settle()
        self._each(lambda part: part.select(rows))
        chosen = rows.tolist()
        self._tokens = [list(self._tokens[row]) for row in chosen]
        self.initial = [self.initial[row] for row in chosen]

    @torch.inference_mode()
    def fork(self) -> CausalSession:
        """An independent session with a copy of the cache."""
        self._settle()
        twin = self._blank()
        twin.vocab_size, twin.short_list = self.vocab_size, self.short_list
        twin._cache = self._cache.fork()
        twin._hidden = self._hidden.fork() if self._hidden is not None else None
        twin._tokens = [list(tokens) for tokens in self._tokens]
        return twin

    def _blank(self) -> CausalSession:
        """A session of the same kind with nothing in its cache, for `fork`."""
        return CausalSession(self.network, self.initial, self.vocab_size, self._hidden is not None)

    def kv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """K, V [B, H_kv, S, D] of one layer and the valid length of each row [B]; read only."""
        self._settle()
        key, value = self._cache.layer(layer)
        return key, value, torch.tensor([len(tokens) for tokens in self._tokens])

    def hidden(self) -> Tensor:
        """[B, S, H] last-layer states of the cached tokens; needs `open(…, hidden=True)`."""
        if self._hidden is None:
            raise ValueError("this session keeps no hidden states: open it with hidden=True")
        self._settle()
        return self._hidden.view()[:, 0]
