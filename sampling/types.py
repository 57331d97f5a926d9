"""The types that cross a boundary inside the decoder: what a model, a session, a drafter and a
sampler owe each other. Holds no algorithm and knows no text.

Shapes: B rows, N draft nodes, V vocabulary, T fed tokens, S cached slots, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

import torch
from torch import Tensor

from sampling.events import Call, Proposal, Step

Rows = list[list[int]]
"""B ragged committed sequences, on the host."""


class Rule(IntEnum):
    """By which rule a drafter's drafts are verified (sampling/verify/rules.py). It is a trait of the drafter, fixed
    before anything is drawn: a rule that depended on what was drawn would not be the one whose exactness was proved.

    Where a sampler's drafts are point masses (greedy, gumbel coupling) POINT verifies every draft. Of a drafter made of
    several the highest of their rules verifies all drafts; its point masses are distributions with all mass on one id
    then.
    """

    POINT = 0  # point masses under every sampler
    DRAWN = 1  # drawn from distributions that travel with them; verified in turn
    BLOCK = 2  # chains so drawn; verified as a whole


class Tree(Enum):
    """How a drafter's trees grow, where the target takes trees."""

    BEST_FIRST = 1  # one row: by the path's probability; nodes are weighed one by one
    SIDEWAYS = 2  # a chain as deep as the budget says with siblings beside it, up to its number of nodes


Hidden = bool | tuple[int, ...]
"""Which states of a model are wanted: i ≥ 0 is what enters its layer i (transformers' `hidden_states[i]`), −1 what the
head is applied to. True stands for (−1,), False for none."""


Room = Callable[[int, int], Tensor]  # rows, numbers of each → [rows, numbers] to be written to


def states_of(*hidden: Hidden) -> tuple[int, ...]:
    """The states that any of these ask for, each once."""
    each = [((-1,) if one else ()) if isinstance(one, bool) else one for one in hidden]
    return each[0] if len(each) == 1 else tuple(sorted({state for one in each for state in one}))


@dataclass(frozen=True, slots=True)
class Traits:
    """What a drafter is, said once and fixed before it drafts."""

    names: tuple[str, ...] = ()  # who proposes: what `Draft.source` and `Step.source` index into
    rule: Rule = Rule.DRAWN
    needs_hidden: Hidden = False  # the target's states that it reads: open the target's session with them
    needs_kv: bool = False  # it reads the target's keys and values
    one_row: bool = False  # it follows a single row: several prompts at a time are refused by its name
    reads_one_row: bool = False  # of several rows it reads no states of the target
    shared_noise: bool = False  # it looks at the noise of the target's draw (point masses only)
    tree: Tree | None = None  # None: chains
    most: int | None = None  # tokens of a round where the drafter says how many (a cascade); None: the budget does


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """What a node of a tree must bring to be worth its place in the target's pass."""

    v: Sequence[float]  # v(1), v(2), …: the time of a pass over so many tokens, relative to one
    calibration: float = 1.0  # share of the tokens that drafters predict which is accepted
    rate: float = 1.0  # tokens that the time of a one-token pass brings anyway


@dataclass(frozen=True, slots=True)
class Budget:
    """How much to draft in one round; a gamma controller makes it."""

    max_depth: list[int]  # of each row the tokens down to its deepest draft; the loop cuts it to the room that is left
    max_nodes: int | None = None  # of a row in all; None: as many as the drafter itself has (a best-first tree: depth)
    costs: NodeCosts | None = None  # None: nothing is known of costs, every node stays
    opportunity_cost: float | None = None  # tokens that come anyway while the drafter's model runs; None: not known


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one round. -1 marks an absent node; an empty draft has N = 0."""

    tokens: Tensor  # [B, N] long
    probs: Tensor | None = None  # [B, N, V] float: what each node was really drawn from; None = point masses
    draft_prob: Tensor | None = None  # [B, N] the drafter's own probability of each node at temperature 1; None: 1
    parents: Tensor | None = None  # [N] long, -1 = root; None = a chain
    source: Tensor | None = None  # [N] or [B, N] index into the drafter's `traits.names`
    calls: tuple[Call, ...] = ()
    trace: tuple[Step, ...] = ()
    promised: float = 0.0  # accepted tokens that a tree's paths promise; 0 where the drafter says nothing
    seconds: float | None = None  # of a simulated drafter: what drafting is charged, in place of what it took

    @staticmethod
    def empty(rows: int) -> Draft:
        """A draft of no nodes for `rows` rows."""
        return Draft(torch.empty((rows, 0), dtype=torch.long))


class Distributions(Protocol):
    """A verifier's processed distributions at the root and after each node of a draft, worked out where they are asked
    for."""

    quick: bool  # `drawn` works out no distribution

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor: ...  # [M] places, [M] nodes (-1: the root) → [M, V]
    def all(self) -> Tensor: ...  # [B, N+1, V]
    def drawn(self, row: int, node: int, position: tuple[int, int]) -> int: ...  # the token there, by this key's noise
    def glance(self, row: int, node: int) -> Glance | None: ...  # what is known of the logits there, if it is cheap


class Glance(Protocol):
    """What was seen of one position's logits when its token was drawn."""

    @property
    def gap(self) -> float: ...  # what the largest is ahead of the next one
    def chances(self, ids: Sequence[int]) -> list[float]: ...  # of these ids at temperature 1
    def likeliest(self) -> list[tuple[int, float]]: ...  # a few ids and their processed probabilities; []: not known


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier made of a draft."""

    path: Tensor  # [B, A] long: accepted nodes from the root, -1 padded
    token: Tensor  # [B] long: the verifier's own token (correction or bonus)
    distributions: Tensor | Distributions  # [B, N+1, V], or worked out where they are asked for
    logits: Tensor  # [B, N+1, V] raw

    @property
    def probs(self) -> Tensor:
        """[B, N+1, V] the verifier's processed distribution at the root and after each node: all that were looked at
        and the many that were not. See :meth:`at`."""
        return self.distributions if isinstance(self.distributions, Tensor) else self.distributions.all()

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """[M, V] the distributions of the rows at these places [M] behind these nodes [M] (-1: the root)."""
        known = self.distributions
        return known[rows, nodes + 1] if isinstance(known, Tensor) else known.at(rows, nodes)


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
    def resume(self, length: int) -> int: ...  # the longest prefix of so many slots that a pass can go on from
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
    def reduced_ids(self) -> Tensor | None: ...  # [n] long, ascending: the ids that logits are of; None = all
    @property
    def takes_trees(self) -> bool: ...  # whether its attention takes the mask of a tree, of any size at any length
    @property
    def ragged(self) -> bool: ...  # whether without a mask rows may begin at different slots: those of their positions
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def new_cache(self, rows: int) -> KVCache: ...

    def forward(
        self,
        ids: Tensor,  # [B, T] long
        positions: Tensor,  # [B, T] long
        mask: Tensor | None,  # [B, 1, T, S+T] additive, model dtype; None = causal after the slots before
        cache: KVCache,
        keep: int,  # logits of the last `keep` columns only
        hidden: Hidden = False,
    ) -> tuple[Tensor, Tensor | None]: ...  # logits [B, keep, n]; the states wanted beside each other [B, T, K·H]


class RaggedNetwork(Network, Protocol):
    """One whose `ragged` is true."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        keep: int,
        hidden: Hidden = False,
        sequences: Tensor | None = None,  # [B] which rows of the cache these are; None = all
    ) -> tuple[Tensor, Tensor | None]: ...

    def of_one_row(  # the same of a cache of one row: its next tokens, and the nodes of a draft behind them
        self,
        new: list[int],
        nodes: list[int],
        parents: Sequence[int],  # of each node the one above, which comes before it; -1 = the row
        cache: KVCache,
        hidden: Hidden = False,
        states: Room | None = None,  # where these go
    ) -> Tensor: ...  # logits [1, N+1, n] behind the row and each node


class Session(Protocol):
    """One LM, its KV cache and the tokens the cache holds.

    `vocab_size` is V: of a session beside a target's the target's, so that both speak of the same ids. What the model
    has no id for gets -inf, what the target has no id for is left out: any distribution that drafts are drawn from is
    exact.
    """

    vocab_size: int
    initial: Rows  # what rows begin with: the prompt, or [[decoder_start]] * B
    source: Rows | None = None  # the prompt where it is no part of the rows: an encoder reads it
    device: torch.device | None = None  # where passes run; None: there is nothing to wait for
    reduced_ids: Tensor | None = None  # [n] the ids, ascending, that `score_reduced` is of; None: all

    @property
    def takes_trees(self) -> bool:
        """Whether a draft may be a tree, of any size and at any length."""
        return True

    def rollback(self, rows: Rows) -> list[int]: ...  # crop to the common prefix; cached tokens per row
    def score(self, rows: Rows, draft: Draft) -> Tensor: ...  # [B, N+1, V]; an empty draft gives [B, 1, V]
    def commit(self, path: Tensor) -> None: ...  # [B, A] commit these draft nodes
    def select(self, rows: Tensor) -> None: ...  # [B'] expand / reorder / drop rows
    def fork(self) -> Session: ...  # an independent copy, for a second lane
    def kv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]: ...  # K, V [B, H_kv, S, D], valid [B]; read only
    def hidden(self, wanted: tuple[int, ...] = ()) -> Tensor: ...  # [B, S, K·H] of committed tokens; (): all it keeps

    def draftable(self, length: int) -> int | None:
        """How many tokens a draft behind `length` tokens may have; None: any number."""
        return None

    def read(self) -> int:
        """Read what stands apart from the rows (`source`), once; how many tokens that were."""
        return 0

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, N+1, n] logits of the ids in `reduced_ids`."""
        return self.score(rows, draft)


class LM(Protocol):
    """A language model that can open sessions."""

    name: str
    vocab_size: int
    context: int
    device: torch.device | None = None
    encodes: bool = False  # an encoder reads its prompts
    reads_hidden: Hidden = False  # the hidden states of their target that its sessions read
    reads_kv: bool = False  # … its keys and values
    reviews: bool = True  # its sessions score drafts
    block: int = 0  # the most tokens that one pass drafts, where it drafts several; 0: one a pass

    def open(
        self,
        prompt: Rows,
        *,
        previous: Session | None = None,  # take over its cache (it must not be used again)
        target: Session | None = None,  # whose ids the logits are of, and whose cache some models read
        hidden: Hidden = False,
    ) -> Session: ...


class Sampler(Protocol):
    """The only source of randomness: all noise is a function of its seed and its key, and nothing is counted."""

    @property
    def needs_prefixes(self) -> bool: ...  # the distribution depends on the tokens before, or on which id a logit is of
    @property
    def point_mass(self) -> bool: ...  # drafts are point masses (greedy drafts, gumbel coupling)
    @property
    def greedy(self) -> bool:  # the draw is the largest logit, whatever stands before it
        return False

    @property
    def tempered(self) -> float | None:
        """The temperature where a draw is that of the logits' softmax at it, made with the noise of
        :meth:`noise_state`; None where there is more to it."""
        return None

    @property
    def notes(self) -> bool:
        """Whether every coin is noted, so that none may be tossed that decides nothing."""
        return False

    def noise_state(self, row: int, position: int) -> int:
        """The signed 64-bit state of the noise that the target's draw there is made with."""
        return 0

    def probs(self, logits: Tensor, prefixes: Rows) -> Tensor:
        """[..., V] logits → [..., V] float32 processed probabilities.

        `prefixes` holds one prefix for each distribution (flattened over the leading dimensions), or is
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

    def shared_noise(self, row: int, position: int, ids: Sequence[int]) -> list[float]:
        """What the target's own draw there adds to the logit of each id, which a drafter may look at whose drafts are
        all point masses: those never touch what is said. Whoever lets the noise decide *whether* a drawn draft is made
        biases the draw behind its refusal. A sampler that shows nothing says 0."""
        return [0.0] * len(ids)

    def noise(self, row: int, position: int, ids: Sequence[int]) -> list[float]:
        """The Gumbel noise of each id in the target's draw there, for whoever looks at a draw that is over."""
        return [0.0] * len(ids)

    def numbers(self, keys: Tensor) -> list[float]:
        """The number in (0, 1) of each coin with these keys [M, 4], for whoever looks at coins that were tossed."""
        return [0.0] * len(keys)


class Drafter(Protocol):
    """A way of drafting. `start` opens an answer; `propose` and `observe` alternate.

    `start` opens the drafter's own sessions but reads no prompt: the loop feeds `sessions` in
    pieces, so that an interrupt is heeded there too. What a drafter has no need of is here.
    """

    traits: Traits

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Its models' sessions."""
        return ()

    @property
    def models(self) -> tuple[LM, ...]:
        """The models it runs."""
        return ()

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open an answer beside the outermost target and the immediate reviewer."""
        return

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """A draft behind each row, within the budget; it may be empty."""
        return Draft.empty(len(rows))

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        """A round is over; `rows` as they were before it."""
        return

    def select(self, rows: Tensor) -> None:
        """[B'] expand, reorder or drop rows."""
        return

    def considered(self, row: int, path: list[int], count: int, tokens: Sequence[int]) -> tuple[Proposal, ...]:
        """In the last round, behind this path of drafts of row `row`: the `count` likeliest tokens, and those of
        `tokens` that were considered too. () where nothing was considered, or the drafter does not keep it."""
        return ()


class GammaController(Protocol):
    """Chooses how much to draft. Decides from past rounds only, and touches no drafter."""

    def budget(self, rows: list[int]) -> Budget: ...  # of the coming round, by row ids
    def observe(self, steps: list[Step], promised: float) -> None: ...  # a round: of each row, and `Draft.promised`


@dataclass(frozen=True, slots=True)
class FixedPace:
    """The same gamma every round."""

    value: int

    def budget(self, rows: list[int]) -> Budget:
        return Budget([self.value] * len(rows))

    def observe(self, steps: list[Step], promised: float) -> None:
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
