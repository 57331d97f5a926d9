"""The types that cross a boundary inside the decoder: what a model, a session, a drafter and a
sampler owe each other. Holds no algorithm and knows no text.

Shapes: B rows, N draft nodes, V vocabulary, T fed tokens, S cached slots, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from sampling.events import Call, Step

Rows = list[list[int]]
"""B ragged committed sequences, on the host."""


class Rule(IntEnum):
    """By which rule a drafter's drafts are judged (sampling/verify/rules.py). It is a trait of the drafter, fixed
    before anything is drawn: a rule that depended on what was drawn would not be the one whose exactness was proved.

    Where a sampler's drafts are point masses (greedy, gumbel coupling) POINT judges every drafter. Of a drafter made of
    several the highest of their rules judges all it drafts; its point masses are laws with all mass on one id then.
    """

    POINT = 0  # point masses under every sampler
    DRAWN = 1  # drawn from laws that travel with them; judged in turn
    BLOCK = 2  # chains so drawn; judged as a whole


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one round. -1 marks an absent node; an empty draft has N = 0."""

    tokens: Tensor  # [B, N] long
    probs: Tensor | None = None  # [B, N, V] float: the law each node was really drawn from; None = point masses
    raw: Tensor | None = None  # [B, N] the drafter's temperature-1 probability of each node
    parents: Tensor | None = None  # [N] long, -1 = root; None = a chain
    source: Tensor | None = None  # [N] or [B, N] index into the drafter's `names`
    calls: tuple[Call, ...] = ()
    trace: tuple[Step, ...] = ()

    @staticmethod
    def empty(rows: int) -> Draft:
        """A draft of no nodes for `rows` rows."""
        return Draft(torch.empty((rows, 0), dtype=torch.long))


class Laws(Protocol):
    """A verifier's processed laws at the root and after each node of a draft, worked out where they are asked for."""

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor: ...  # [M] places, [M] nodes (-1: the root) → [M, V]
    def all(self) -> Tensor: ...  # [B, N+1, V]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier made of a draft."""

    path: Tensor  # [B, A] long: accepted nodes from the root, -1 padded
    token: Tensor  # [B] long: the verifier's own token (correction or bonus)
    laws: Tensor | Laws  # [B, N+1, V]
    logits: Tensor  # [B, N+1, V] raw

    @property
    def probs(self) -> Tensor:
        """[B, N+1, V] the verifier's processed law at the root and after each node: all that were looked at and the
        many that were not. See :meth:`law`."""
        return self.laws if isinstance(self.laws, Tensor) else self.laws.all()

    def law(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """[M, V] the laws of the rows at these places [M] behind these nodes [M] (-1: the root)."""
        return self.laws[rows, nodes + 1] if isinstance(self.laws, Tensor) else self.laws.at(rows, nodes)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a row ends. `context` bounds prompt + answer; a row that meets it ends with "length"."""

    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    context: int = 1 << 30


class KVCache(Protocol):
    """The keys and values of one model for B rows; every row has `length` slots."""

    @property
    def length(self) -> int: ...
    def crop(self, length: int) -> None: ...  # keep the first `length` slots
    def shift(self, moves: Tensor, length: int) -> None: ...  # [3, K]: row, from, to; keep the first `length`
    def select(self, rows: Tensor) -> None: ...  # [B'] expand / reorder / drop rows
    def fork(self) -> KVCache: ...  # an independent copy
    def layer(self, index: int) -> tuple[Tensor, Tensor]: ...  # K, V [B, H_kv, length, D]


class Network(Protocol):
    """One causal model as a function of new tokens and a cache. It appends T slots to the cache."""

    vocab_size: int
    context: int
    layers: int

    @property
    def short_list(self) -> Tensor | None: ...  # [n] long, ascending: the ids that logits are of; None = all
    @property
    def takes_trees(self) -> bool: ...  # whether its attention takes the mask of a tree, of any size at any length
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def new_cache(self, rows: int) -> KVCache: ...

    def forward(
        self,
        ids: Tensor,  # [B, T] long
        positions: Tensor,  # [B, T] long
        mask: Tensor | None,  # [B, 1, T, S+T] additive, model dtype; None = causal after all S slots
        cache: KVCache,
        keep: int,  # logits of the last `keep` columns only
        hidden: bool = False,
    ) -> tuple[Tensor, Tensor | None]: ...  # logits [B, keep, n]; last hidden states [B, T, H]


class Session(Protocol):
    """One LM, its KV cache and the tokens the cache holds.

    V is `vocab_size`: of a session beside a target's the target's, so that both speak of the same ids. What the model
    has no id for gets -inf, what the target has no id for is left out: any law that drafts are drawn from is exact.

    Where the prompt is no part of the rows (an encoder reads it) the session has it as `source`, rows begin with
    `initial`, and `read() -> int` reads the prompt once and says how many tokens that were.
    """

    @property
    def vocab_size(self) -> int: ...  # V
    @property
    def takes_trees(self) -> bool: ...  # whether a draft may be a tree, of any size and at any length
    @property
    def initial(self) -> Rows: ...  # the prompt, or [[decoder_start]] * B
    def sync(self, rows: Rows) -> list[int]: ...  # crop to the common prefix; cached tokens per row
    def score(self, rows: Rows, draft: Draft) -> Tensor: ...  # [B, N+1, V]; an empty draft gives [B, 1, V]
    def keep(self, path: Tensor) -> None: ...  # [B, A] commit these draft nodes
    def select(self, rows: Tensor) -> None: ...  # [B'] expand / reorder / drop rows
    def fork(self) -> Session: ...  # an independent copy, for a second lane
    def kv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]: ...  # K, V [B, H_kv, S, D], valid [B]; read only
    def hidden(self) -> Tensor: ...  # [B, S, H] last-layer states of committed tokens


class LM(Protocol):
    """A language model that can open sessions."""

    name: str
    vocab_size: int
    context: int

    def open(
        self,
        prompt: Rows,
        *,
        previous: Session | None = None,  # take over its cache (it must not be used again)
        target: Session | None = None,  # whose ids the logits are of, and whose cache some models read
        hidden: bool = False,
    ) -> Session: ...


class Sampler(Protocol):
    """The only source of randomness: all noise is a function of its seed and its key, and nothing is counted."""

    def law(self, logits: Tensor, prefixes: Rows) -> Tensor:
        """[..., V] logits → [..., V] float32 processed probabilities.

        `prefixes` holds one prefix for each law (flattened over the leading dimensions), or is
        empty when `needs_prefixes` is False.
        """
        ...

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        """[M, V] probabilities → [M] ids.

        Keys on the host, [M, 2]: row, position. A drafter that draws several times for one position keys the further
        draws by their turn too, [M, 3].
        """
        ...

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        """[M] probabilities → [M] bool: u < prob, never ≤.

        Keys on the host, [M, 4]: row, position, committed length at the round's start, turn among siblings.
        """
        ...

    def drafting(self, starts: Tensor) -> Sampler:
        """The drafter's view in the round that begins at `starts` [B, 2] (row, committed length): noise of its own, or
        the target's under gumbel coupling. Of a view: that of a round inside its round."""
        ...

    @property
    def needs_prefixes(self) -> bool: ...  # the law depends on the tokens before, or on which id a logit is of

    @property
    def point_mass(self) -> bool: ...  # drafts are point masses (greedy drafts, gumbel coupling)


class Drafter(Protocol):
    """A way of drafting. `start` opens an answer; `propose` and `observe` alternate. `rule` says how its drafts are
    judged, and so what they are: see :class:`Rule`.

    `start` opens the drafter's own sessions but reads no prompt: the loop feeds `sessions` in
    pieces, so that an interrupt is heeded there too. A drafter that reads the target's hidden states
    has an attribute `needs_hidden = True`: the target's session is then opened with `hidden=True`. One that follows
    a single row has an attribute `one_row = True`: several prompts at a time are then refused by its name.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def rule(self) -> Rule: ...

    @property
    def sessions(self) -> tuple[Session, ...]: ...  # its models' sessions; () if it has none

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None: ...
    def propose(self, rows: Rows, k: list[int], sampler: Sampler) -> Draft: ...  # depth ≤ k per row; may be empty
    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None: ...  # rows as before the round
    def select(self, rows: Tensor) -> None: ...


class Pace(Protocol):
    """Chooses gamma. Decides from past rounds only."""

    def gamma(self, rows: list[int]) -> list[int]: ...  # row ids → drafts to ask for
    def observe(self, step: Step) -> None: ...


@dataclass(frozen=True, slots=True)
class FixedPace:
    """The same gamma every round."""

    value: int

    def gamma(self, rows: list[int]) -> list[int]:
        return [self.value] * len(rows)

    def observe(self, step: Step) -> None:
        return None


def above(parents: Tensor | None, count: int) -> Sequence[int]:
    """The parent of each node; those of a chain where `parents` is None."""
    found: Sequence[int] = range(-1, count - 1) if parents is None else parents.tolist()
    return found


def depths_of(parents: Tensor | None, count: int) -> list[int]:
    """How many tokens there are on the way down to each node, itself included."""
    depths: list[int] = []
    for parent in above(parents, count):
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
