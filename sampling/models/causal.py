"""LM and Session over causal models. The cache follows by common prefix: `rollback` crops it to the common prefix with
the rows, `score` feeds the missing tokens and the draft. Knows no sampling and no text.

Layout: after `commit` or `rollback` token i of every row lies in slot i (rows of unequal length leave the slots after
their end unused). Between `score` and `commit` the new tokens of a tree, and all new tokens in a network that is not
ragged, lie after the longest row.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from sampling.models.cache import Buffer, RowStates, SlotCache, additive, joined, places
from sampling.models.network import LengthTables, network_of
from sampling.rows import common_prefix, put
from sampling.types import LM, Draft, DraftTree, Hidden, KVCache, Network, RaggedNetwork, Rows, Session, states_of
from sampling.vocabulary import spread
from utils.errors import UserError

Own = TypeVar("Own", bound="CausalSession")
UNKNOWN = -1  # in place of a token that is on the device only


class Pending(NamedTuple):
    """Tokens of a row that the last pass read: `fed` committed ones, whose slots end before `end`, and the nodes of a
    draft from there on. `whole`: a draft that is a chain stays unless a path is given."""

    fed: int
    end: int
    tree: DraftTree
    whole: bool


class CausalSession(Session):
    """B rows of one causal model; a :class:`sampling.types.Session`.

    `reduced_ids` [n] is its reduced vocabulary: those of the `vocab_size` ids, ascending, that the model's head covers;
    None = all of them. An id that the model has no row for is read as its last one.
    """

    lm: "CausalLM"  # that opened it

    def __init__(self, network: Network, prompt: Rows, vocab_size: int, hidden: Hidden) -> None:
        self.network, self._ragged, self.initial, self.device = network, network.ragged, prompt, network.device
        self.takes_trees = network.takes_trees
        self._by_length: LengthTables | None = getattr(network, "by_length", None)
        self.can_step = self._by_length is None
        self._lengths = [0] * len(prompt)  # of each row's text, by which its cached keys were rotated
        self.cover(vocab_size, vocab_size)
        self.keeps_hidden = states_of(hidden)  # the states that `hidden` can return
        self._hidden: Buffer | None = Buffer() if hidden else None
        self._states = RowStates()  # the addresses of the states in `_hidden`, once they were read
        self._reset(len(prompt))

    def cover(self, own: int, size: int) -> None:
        """Give logits of `size` ids, of which the model has the first `own`."""
        ids, known = self.network.reduced_ids, min(own, size)
        if ids is None and own < size:
            ids = torch.arange(own, device=self.device)
        self.vocab_size = size
        self.reduced_ids = None if ids is None else ids[: int((ids < known).sum())]
        self.columns = size if self.reduced_ids is None else len(self.reduced_ids)

    def _reset(self, rows: int) -> None:
        self._cache: KVCache = self.network.new_cache(rows)
        if self._hidden is not None:
            self._hidden = Buffer()
        self._tokens: Rows = [[] for _ in range(rows)]  # the tokens in the aligned slots
        self._pending: list[Pending] | None = None  # of the draft last scored; None: every token lies in its slot

    def reusable(self, network: Network, rows: int, hidden: Hidden) -> bool:
        """Whether a session of `network` can go on from this one's cache."""
        return network is self.network and rows == len(self._tokens) and {*states_of(hidden)} <= {*self.keeps_hidden}

    def again(self, prompt: Rows) -> Self:
        """Return this session, opened for another prompt."""
        if self._by_length is not None and self._by_length.dynamic and any(map(self._by_length.table, self._lengths)):
            self._reset(len(prompt))  # an answer's keys were rotated by several tables, a prompt's are by one
        self.initial = prompt
        self.rollback(prompt)
        return self

    def held(self) -> list[int]:
        """The number of cached tokens of each row; crops nothing."""
        self._settle()
        return list(map(len, self._tokens))

    # -- following the rows ------------------------------------------------------------------

    def rollback(self, rows: Rows) -> list[int]:
        """Crop to the common prefix with `rows`; return the number of cached tokens of each row."""
        self._settle()
        return self._crop([common_prefix(cached, row) for cached, row in zip(self._tokens, rows, strict=True)])

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, N+1, V] logits after each row and after each of its N nodes; feeds the missing tokens.

        At least the last token of each row is fed. An error in the pass leaves an empty cache.
        """
        logits, ids = self.score_reduced(rows, draft), self.reduced_ids
        return logits if ids is None else spread(logits, ids, self.vocab_size, float("-inf"))

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """`score` with the logits of the reduced vocabulary alone, [B, N+1, n]; of all ids if there is none."""
        known = self.rollback(rows)
        cached = [min(length, len(row) - 1) for length, row in zip(known, rows, strict=True)]
        if cached != known:
            cached = self._crop(cached)
        if self._by_length is not None and not self._follow(self._by_length, rows, cached):
            self._reset(len(rows))
            cached = [0] * len(rows)
        feed = [row[length:] for row, length in zip(rows, cached, strict=True)]
        try:
            logits = self._forward(feed, draft.trees)
        except BaseException:
            self._reset(len(rows))
            raise
        return self.cut(logits)

    def _follow(self, tables: LengthTables, rows: Rows, cached: list[int]) -> bool:
        """Switch to the tables for texts of these lengths; return whether the cached tokens can stay.

        A row shorter than the prompt is a part of it and read with the table of the whole prompt.
        """
        before = self._lengths
        self._lengths = [max(map(len, pair)) for pair in zip(rows, self.initial, strict=True)]
        return all(
            not known
            or tables.table(old) == tables.table(new)
            or (tables.dynamic and (known, old) == (new - 1, new - 1))
            for known, old, new in zip(cached, before, self._lengths, strict=True)
        )

    def draftable(self, length: int) -> int | None:
        return None if self._by_length is None else self._by_length.draftable(length)

    def cut(self, logits: Tensor) -> Tensor:
        """The columns of the session's ids in the model's logits [..., n or V]."""
        return logits if logits.shape[-1] == self.columns else logits[..., : self.columns]

    def _forward(self, feed: Rows, trees: Sequence[DraftTree]) -> Tensor:
        if len(feed) > 1 or (network := self._ragged) is None:
            return self._together(feed, trees)
        states = None if self._hidden is None else self._hidden.allocate
        logits = network.of_one_row(feed[0], trees[0], self._cache, self.keeps_hidden, states)
        self._note(feed, trees, [self._cache.length - len(trees[0].tokens)])
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        self._settle()
        unknown = [[UNKNOWN] for _ in self._tokens]
        try:
            return self.cut(self._together(unknown, Draft.empty(len(unknown)).trees, tokens[:, None]))[:, 0]
        except BaseException:
            self._reset(len(unknown))
            raise

    def fill_in(self, tokens: Rows) -> None:
        self._settle()
        for row, known in zip(self._tokens, tokens, strict=True):
            if known:
                row[-len(known) :] = known

    @torch.inference_mode()
    def _together(self, feed: Rows, trees: Sequence[DraftTree], ids: Tensor | None = None) -> Tensor:
        """Run a pass over several rows, or by a network that takes tensors only. `ids` [B, T]: the new tokens, if they
        are on the device already. Unless `_by_width` runs it, new tokens lie after the longest row.
        """
        sizes = [len(tree.tokens) for tree in trees]
        start, width, count = self._cache.length, max(map(len, feed)), max(sizes)
        lengths, mask = self.held(), None
        chains = all(tree.is_chain for tree in trees)
        level = len({*lengths}) == len({*map(len, feed)}) == len({*sizes}) == 1
        if chains and not level and (ragged := self._ragged) is not None:
            return self._by_width(ragged, feed if ids is None else ids.tolist(), trees, lengths)
        if chains and level:
            positions = torch.arange(start, start + width + count).expand(len(feed), -1)
        else:
            positions, seen = places(lengths, feed, trees, start, width, count)
            positions = positions.clamp(max=self.network.context - 1)  # of nodes that a row lacks
            mask = additive(seen, self.network)
        if ids is None:
            columns = [
                [*[0] * (width - len(new)), *new, *tree.tokens, *[0] * (count - len(tree.tokens))]
                for new, tree in zip(feed, trees, strict=True)
            ]
            ids = put(torch.tensor(columns).clamp_(0, self.network.vocab_size - 1), self.device)
        logits, hidden = self._run(ids, positions, mask, count + 1)
        if self._hidden is not None and hidden is not None:
            self._hidden.append(hidden[:, None].to(self.device))
        self._note(feed, trees, [self._cache.length - count] * len(feed))
        return logits

    def _by_width(self, network: RaggedNetwork, feed: Rows, trees: Sequence[DraftTree], lengths: list[int]) -> Tensor:
        """Run one pass for each number of fed tokens; every token goes to the slot of its position."""
        rows_by_width: dict[int, list[int]] = {}
        for row, new in enumerate(feed):
            rows_by_width.setdefault(len(new), []).append(row)
        count, parts = max(len(tree.tokens) for tree in trees), list[Tensor]()
        nodes = [[*tree.tokens, *[0] * (count - len(tree.tokens))] for tree in trees]
        for width, rows in rows_by_width.items():
            ids = torch.tensor([feed[row] + nodes[row] for row in rows]).clamp_(0, self.network.vocab_size - 1)
            positions = torch.tensor([lengths[row] for row in rows])[:, None] + torch.arange(width + count)
            chosen = torch.tensor(rows)
            logits, hidden = network.forward(
                *(ids, positions, None, self._cache, count + 1, self.keeps_hidden),
                None if len(rows_by_width) == 1 else chosen,
            )
            if self._hidden is not None and hidden is not None:
                self._hidden.place(hidden[:, None], positions, chosen, len(feed))
            parts.append(logits)
        self._note(feed, trees, [length + len(new) for length, new in zip(lengths, feed, strict=True)])
        if len(rows_by_width) == 1:
            return parts[0]
        return torch.cat(parts)[torch.tensor([row for rows in rows_by_width.values() for row in rows]).argsort()]

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        """Run the pass of ids [B, T] at host positions [B, T] → logits [B, keep, n or V], and states [B, T, K·H] if
        kept."""
        if self._by_length is not None:
            cast(SlotCache, self._cache).lengths = self._lengths
        return self.network.forward(ids, put(positions, self.device), mask, self._cache, keep, self.keeps_hidden)

    def _note(self, feed: Rows, trees: Sequence[DraftTree], ends: list[int]) -> None:
        """Note the slots that the pass filled: each row's fed tokens lie before its slot in `ends`, nodes from there
        on."""
        self._pending = [Pending(len(new), end, tree, True) for new, tree, end in zip(feed, trees, ends, strict=True)]
        for tokens, new in zip(self._tokens, feed, strict=True):
            tokens.extend(new)

    def commit(self, path: Rows) -> None:
        """Commit these nodes of each row of the draft last scored."""
        self._settle(path)

    def _settle(self, paths: Rows | None = None) -> None:
        """Bring token i of each row to slot i. The nodes of `paths` stay; without `paths` whole chains do, and no node
        of a tree."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        moves: list[tuple[int, int, int]] = []
        for row, (tokens, (fed, end, tree, whole)) in enumerate(zip(self._tokens, pending, strict=True)):
            first = len(tokens)
            path = paths[row] if paths is not None else range(len(tree.tokens)) if whole and tree.is_chain else ()
            tokens += [tree.tokens[node] for node in path]
            if end != first:
                moves += [(row, end - fed + index, first - fed + index) for index in range(fed)]
            moves += [(row, end + node, slot) for slot, node in enumerate(path, start=first) if end + node != slot]
        length = max(map(len, self._tokens))
        if moves:
            self._each(lambda part: part.shift(moves, length))
        elif length < self._cache.length:
            self._shorten(length)

    def _crop(self, lengths: list[int]) -> list[int]:
        """Keep `lengths` tokens of each row, or fewer if the next pass must start earlier; return the numbers kept."""
        most = self._cache.resume(max(lengths))
        if most == self._cache.length and lengths == [*map(len, self._tokens)]:  # there is nothing to drop
            return lengths
        lengths = [min(length, most) for length in lengths]
        for tokens, length in zip(self._tokens, lengths, strict=True):
            del tokens[length:]
        self._shorten(max(lengths))
        return lengths

    def _shorten(self, length: int) -> None:
        """Keep the first `length` slots of the cache and of the hidden states."""
        self._cache.crop(length)
        if self._hidden is not None:
            self._hidden.crop(length)

    @torch.inference_mode()
    def _each(self, act: Callable[[KVCache | Buffer], None]) -> None:
        act(self._cache)
        if self._hidden is not None:
            act(self._hidden)

    # -- rows, copies and what others read -----------------------------------------------------

    def select(self, rows: Tensor) -> None:
        """Keep, reorder or repeat rows: [B'] indices."""
        self._settle()
        self._each(lambda part: part.select(rows))
        self._tokens = [list(self._tokens[row]) for row in rows.tolist()]
        self.initial = [self.initial[row] for row in rows.tolist()]
        self._lengths = [self._lengths[row] for row in rows.tolist()]

    @torch.inference_mode()
    def fork(self) -> Self:
        """An independent session with a copy of the cache."""
        self._settle()
        twin = copy(self)
        twin._cache, twin._hidden = self._cache.fork(), self._hidden and self._hidden.fork()
        twin._tokens = [list(tokens) for tokens in self._tokens]
        return twin

    def kv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return K, V [B, H_kv, S, D] of one layer, on its device, and the valid length of each row [B]; read only."""
        self._settle()
        return *self._cache.layer(layer), torch.tensor(list(map(len, self._tokens)))

    def hidden(self, wanted: tuple[int, ...] = ()) -> Tensor:
        """[B, S, K·H] the K wanted states of the cached tokens, concatenated. ValueError if opened without `hidden`."""
        if self._hidden is None:
            raise ValueError("this session keeps no hidden states: open it with hidden=True")
        self._settle()
        states, kept = self._hidden.view()[:, 0], self.keeps_hidden
        if wanted in ((), kept):
            return states
        each = states.chunk(len(kept), dim=-1)
        return joined([each[kept.index(state)] for state in wanted])

    def states_of_row(self, wanted: tuple[int, ...], first: int) -> RowStates:
        """Return the wanted states of a single row, of token `first` and later ones at least, copied only if they are
        kept in another form."""
        self._settle()
        held = None if self._hidden is None else self._hidden.data
        if held is not None and held is self._states.held and wanted == self.keeps_hidden:
            return self._states
        if held is None or wanted != self.keeps_hidden or held.dtype != torch.float32 or held.device.type != "cpu":
            return RowStates.of(self.hidden(wanted)[0, first:].to("cpu", torch.float32).contiguous(), first)
        self._states = RowStates.of(held)
        return self._states


class CausalLM(LM):
    """A causal model by name.

    Args:
        model: a transformers causal model, or a :class:`sampling.types.Network`.
        name: its name in events and figures.
        vocab_size: use only the first `vocab_size` ids (padded vocabularies); the others have probability 0.
    """

    session_type: Callable[[Network, Rows, int, Hidden], CausalSession] = CausalSession
    mask_token_id = -1  # the id that a block's pass reads in place of each draft

    def __init__(self, model: nn.Module | Network, name: str = "target", vocab_size: int | None = None) -> None:
        self.network = network_of(model)
        self.name = name
        self.vocab_size = min(vocab_size or self.network.vocab_size, self.network.vocab_size)
        self.context, self.device = self.network.context, self.network.device
        self.takes_trees = self.network.takes_trees

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> CausalSession:
        """Open a session for `prompt`; it takes over the cache of `previous`, which the caller must not use again, if
        that is of the same network and number of rows and keeps at least the states in `hidden`.
        """
        self.check(prompt, target)
        if isinstance(previous, CausalSession) and previous.reusable(self.network, len(prompt), hidden):
            return self.beside(previous.again(prompt), target)
        return self.beside(self.session_type(self.network, prompt, self.vocab_size, hidden), target)

    def beside(self, session: Own, target: Session | None) -> Own:
        """Return `session` with logits of the target's ids, or of the model's ids without a target."""
        session.lm = self
        session.cover(self.vocab_size, self.vocab_size if target is None else target.vocab_size)
        return session

    def check(self, prompt: Rows, target: Session | None = None) -> None:
        """UserError for a prompt without tokens or, where no target has read it, with ids outside the vocabulary."""
        if not prompt or not all(prompt):
            raise UserError("the prompt is empty: give at least one token")
        lowest, highest = min(map(min, prompt)), max(map(max, prompt))
        if target is None and not 0 <= lowest <= highest < self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise UserError(f"id {wrong} is outside the vocabulary of {self.name} (0 … {self.vocab_size - 1})")
