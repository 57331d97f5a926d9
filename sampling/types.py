"""The types that cross a boundary inside the decoder: what a model, a session, a drafter and a
sampler owe each other. Holds no algorithm and knows no text.

Shapes: B rows, N draft nodes, V vocabulary, T fed tokens, S cached slots, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sampling.events import Call, Step

Rows = list[list[int]]
"""B ragged committed sequences, on the host."""


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
    ) -> tuple[Tensor, Tensor | None]: ...  # logits [B, keep, V]; last hidden states [B, T, H]


class Session(Protocol):
    """One LM, its KV cache and the tokens the cache holds.

    Where the prompt is no part of the rows (an encoder reads it) the session has it as `source`, rows begin with
    `initial`, and `read() -> int` reads the prompt once and says how many tokens that were.
    """

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
        target: Session | None = None,  # for models that read the target's cache
        hidden: bool = False,
    ) -> Session: ...


class Sampler(Protocol):
    """The only source of randomness; seeded, with a state of its own."""

    def law(self, logits: Tensor, prefixes: Rows) -> Tensor:
        """[..., V] logits → [..., V] float32 processed probabilities.

        `prefixes` holds one prefix for each law (flattened over the leading dimensions), or is
        empty when `needs_prefixes` is False.
        """
        ...

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor: ...  # [M, V], [M, 2] (row, position) → [M]
    def coin(self, prob: Tensor) -> Tensor: ...  # [M] → [M] bool: u < prob, never ≤
    def drafting(self) -> Sampler: ...  # the drafter's view: own noise, or the target's under gumbel coupling

    @property
    def needs_prefixes(self) -> bool: ...  # the law depends on the tokens before, or on which id a logit is of

    @property
    def point_mass(self) -> bool: ...  # drafts are point masses (greedy drafts, gumbel coupling)


class Drafter(Protocol):
    """A way of drafting. `start` opens an answer; `propose` and `observe` alternate.

    `start` opens the drafter's own sessions but reads no prompt: the loop feeds `sessions` in
    pieces, so that an interrupt is heeded there too. A drafter that reads the target's hidden states
    has an attribute `needs_hidden = True`: the target's session is then opened with `hidden=True`. One that follows
    a single row has an attribute `one_row = True`: several prompts at a time are then refused by its name.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

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
