"""The types that cross a boundary inside the decoder: the interfaces of models, sessions, drafters and samplers.
Holds no algorithm and knows no text.

Shapes: B rows, N draft nodes, V vocabulary, n ids of a reduced vocabulary (or V), T fed tokens, S cached slots, K
hidden states of a token, H hidden size, M any number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from sampling.events import Call, Filters, Proposal, Step
from utils.errors import UserError

Rows = list[list[int]]  # B ragged committed sequences, on the host


class Rule(IntEnum):
    """The rule that verifies a drafter's drafts (sampling/verify/rules.py). It is a trait of the drafter, fixed
    before anything is drawn: the proof of exactness does not cover a rule that depends on the draws.

    If a sampler's drafts are point masses (greedy, gumbel coupling), the rule is POINT, unless it is TYPICAL.
    In a drafter made of several, the highest of their rules verifies all drafts; point masses are then distributions
    with all mass on one id.
    """

    POINT = 0  # point masses under every sampler
    DRAWN = 1  # drawn from distributions that the draft carries; verified in turn
    BLOCK = 2  # drawn chains, verified as a whole
    TYPICAL = 3  # lossy, not exact: a draft that the target holds likely enough is accepted, whoever drafted it


# The states of a model that are wanted: i ≥ 0 is the input of its layer i (transformers' `hidden_states[i]`), −1 the
# input of its head. True means (−1,), False none.
Hidden = bool | tuple[int, ...]


# Of each move a row of a cache, its slot, and the lower slot that this is copied to; no later move reads that one.
Moves = Sequence[tuple[int, int, int]]
Allocate = Callable[[int, int], int]  # rows, numbers in a row → the address of memory for so large a float32 matrix


@cache
def states_of(*hidden: Hidden) -> tuple[int, ...]:
    """Return the states that are wanted by any of these, each once."""
    each = [((-1,) if states else ()) if isinstance(states, bool) else states for states in hidden]
    return each[0] if len(each) == 1 else tuple(sorted({state for states in each for state in states}))


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits of a drafter, fixed before it drafts."""

    names: tuple[str, ...] = ()  # its sources; `Draft.source` and `Step.source` are indices into them
    rule: Rule = Rule.DRAWN
    needs_hidden: Hidden = False  # the target's states that it reads: open the target's session with them
    needs_kv: bool = False  # it reads the target's keys and values
    one_row: bool = False  # it drafts for a single row: several prompts at a time raise an error with its name
    reads_one_row: bool = False  # uses hidden states only for a batch of one
    shared_noise: bool = False  # it reads the noise of the target's draw (point masses only)
    tree: bool = False  # best-first trees of one row, if the target takes trees; else chains
    most: int | None = None  # tokens of a round, if the drafter sets their number (a cascade); None: the budget does


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """The figures by which a drafter keeps the nodes of a tree that are worth their part of the target's pass
    (`worthwhile` in sampling/gamma/worth.py)."""

    v: Sequence[float]  # v(1), v(2), …: the time of a pass over n tokens, relative to one
    calibration: float = 1.0  # accepted tokens / tokens that drafters predict
    rate: float = 1.0  # tokens emitted in the time of a one-token pass without this node


@dataclass(frozen=True, slots=True)
class Budget:
    """How much to draft in one round, as the gamma controller decides."""

    max_depth: list[int]  # depth of the deepest draft of each row; the loop cuts it to the room that is left
    max_nodes: int | None = None  # nodes of a row's tree; None: the drafter's own number, by default its max_depth
    costs: NodeCosts | None = None  # None: costs are unknown, every node stays
    opportunity_cost: float | None = None  # tokens emitted in the time of a pass of the drafter's model; None: unknown
    depth_with_forced: list[int] | None = None  # max_depth, tokens that a constraint forces included; None: max_depth


@dataclass(slots=True)
class DraftTree:
    """One row's draft, on the host: N nodes, parents before children. A chain is the tree of width one.

    `children[0]` are those of the root, `children[n + 1]` those of node n.
    """

    tokens: list[int]
    parents: list[int]  # -1: the root, the last committed token
    depths: list[int]  # tokens on the path to each node, its own included
    children: list[list[int]]
    source: list[int]  # indices into the drafter's `traits.names`; the one after the last: forced by a constraint
    draft_prob: list[float]  # the source's own probability of each node at temperature 1

    @staticmethod
    def of(
        tokens: list[int],
        parents: list[int] | None = None,
        source: list[int] | None = None,
        draft_prob: list[float] | None = None,
    ) -> DraftTree:
        """Return the tree of these nodes; without `parents` a chain, of source 0 and probability 1 by default."""
        count = len(tokens)
        parents = [*range(-1, count - 1)] if parents is None else parents
        depths, children = list[int](), [list[int]() for _ in range(count + 1)]
        for node, parent in enumerate(parents):
            depths.append(1 if parent < 0 else depths[parent] + 1)
            children[parent + 1].append(node)
        return DraftTree(tokens, parents, depths, children, source or [0] * count, draft_prob or [1.0] * count)

    @property
    def is_chain(self) -> bool:
        """Return whether every node follows the one before it."""
        return not self.depths or self.depths[-1] == len(self.depths)

    def path_tokens(self, path: Sequence[int]) -> list[int]:
        """Return the tokens of these nodes."""
        return [self.tokens[node] for node in path]


@dataclass(frozen=True, slots=True)
class Draft:
    """The proposal of a drafter for one round: a tree for each row, empty where nothing is drafted.

    N is the number of nodes of the largest tree.
    """

    trees: Sequence[DraftTree]
    probs: Tensor | None = None  # [B, N, V] float: the distribution that each node was drawn from; None = point masses
    calls: tuple[Call, ...] = ()
    trace: tuple[Step, ...] = ()
    promised: float = 0.0  # accepted tokens expected of a tree's paths; 0: unknown
    seconds: float | None = None  # a simulated drafter's price of drafting, instead of its measured time

    @staticmethod
    @cache
    def empty(rows: int) -> Draft:
        """Return a draft of no nodes for `rows` rows."""
        return Draft([DraftTree([], [], [], [[]], [], []) for _ in range(rows)])

    @staticmethod
    def of(tokens: Rows, probs: Tensor | None = None, parents: list[int] | None = None) -> Draft:
        """Return the draft of these tokens: chains, or trees of one shape; `probs` [B, N, V] as the field."""
        return Draft([DraftTree.of(row, parents) for row in tokens], probs)

    @property
    def width(self) -> int:
        """Return N."""
        return max([len(tree.tokens) for tree in self.trees])

    @property
    def tokens(self) -> Rows:
        """Return the tokens of each row."""
        return [tree.tokens for tree in self.trees]


class Facts(Protocol):
    """The facts of a position's logits (sampling/verify/facts.py)."""

    @property
    def likeliest(self) -> list[tuple[int, float]]: ...  # ids, their probabilities in the draw; []: unknown
    @property
    def gap(self) -> float: ...  # between the two largest logits
    def p(self, token: int) -> float: ...  # at temperature 1


class Distributions(Protocol):
    """The verifier's processed distributions at the root and after each node of a draft."""

    def at(self, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Return those of M rows after M nodes (-1: the root), [M, V]."""

    def facts(self, row: int, node: int) -> Facts | None: ...  # of the logits there; None if they take long to compute


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's decision on a draft."""

    path: Rows  # of each row the accepted nodes from the root
    token: list[int]  # of each row the verifier's own token (correction or bonus); -1: the row was not examined
    distributions: Distributions
    logits: Tensor  # [B, N+1, V] biased (`Sampler.biased`), before all other processors, on the model's device


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an answer. `context` bounds a row: prompt + answer, or the decoder's tokens if an encoder reads the
    prompt. A row that reaches it ends with "length"."""

    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    context: int = 1 << 30


class KVCache(Protocol):
    """The keys and values of one model for B rows; every row has `length` slots."""

    @property
    def length(self) -> int: ...
    def crop(self, length: int) -> None: ...  # keep the first `length` slots
    def resume(self, length: int) -> int: ...  # the longest prefix of `length` slots after which a pass can start
    def fork(self) -> KVCache: ...  # an independent copy
    def shift(self, moves: Moves, length: int) -> None:
        """Make the moves, one after the other; keep the first `length` slots."""

    def select(self, rows: Tensor) -> None:
        """Expand, reorder or drop rows, by the indices [B'] of those that stay."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return K and V [B, H_kv, length, D] of one layer."""


class Network(Protocol):
    """One causal model as a function of new tokens and a cache. It appends T slots to the cache."""

    vocab_size: int
    context: int
    layers: int

    @property
    def reduced_ids(self) -> Tensor | None:
        """Return the ids [n] long, ascending, that logits are of; None: all."""

    @property
    def takes_trees(self) -> bool: ...  # its attention takes the mask of a tree, of any size at any length
    @property
    def ragged(self) -> RaggedNetwork | None: ...  # itself, if rows may begin at different slots
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
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass → logits [B, keep, n] and the states wanted, concatenated [B, T, K·H]; None without."""


class RaggedNetwork(Network, Protocol):
    """A network whose rows may have different lengths in the cache: without a mask, a token goes to the slot of its
    position."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        keep: int,
        hidden: Hidden = False,
        sequences: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run as any network; `sequences` [B]: which rows of the cache these are, None: all."""

    def of_one_row(
        self, new: list[int], tree: DraftTree, cache: KVCache, hidden: Hidden = False, states: Allocate | None = None
    ) -> Tensor:
        """Run a pass over the next tokens of one row and the N nodes of its draft → logits [1, N+1, n]. The states in
        `hidden` are written to the memory that `states` gives; None: to none."""


class Session(Protocol):
    """One LM, its KV cache and the tokens the cache holds.

    `vocab_size` is V, the target's for a session beside a target, so that both use the same ids. Ids that the model
    lacks get -inf, ids that the target lacks are left out: drafts may be drawn from any distribution.
    """

    vocab_size: int
    initial: Rows  # the beginning of the rows: the prompt, or [[decoder_start]] * B
    source: Rows | None = None  # the prompt if it is no part of the rows: an encoder reads it
    device: torch.device | None = None  # of the passes; None: nothing runs asynchronously
    reduced_ids: Tensor | None = None  # [n] the ids, ascending, of `score_reduced`; None: all
    described: str = "this session"  # the beginning of an error's line
    takes_trees: bool = True  # a draft may be a tree, of any size and at any length
    can_step: bool = False  # `step` works
    can_grow: bool = False  # `grow` works

    def rollback(self, rows: Rows) -> list[int]: ...  # crop to the common prefix; cached tokens per row
    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """Return logits [B, N+1, V] after each row's last token and after each node; of an empty draft [B, 1, V]."""

    def commit(self, path: Rows) -> None:
        """Commit these nodes of each row's draft; a session that keeps nothing of a draft does nothing."""
        return

    def select(self, rows: Tensor) -> None:
        """Expand, reorder or drop rows, by the indices [B'] of those that stay."""

    def fork(self) -> Session: ...  # an independent copy

    def kv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return K, V [B, H_kv, S, D] and the valid lengths [B], read only. UserError for a session without them."""
        raise UserError(f"{self.described} has no keys and values for a drafter to read")

    def hidden(self, wanted: tuple[int, ...] = ()) -> Tensor:
        """Return [B, S, K·H] of committed tokens; (): all states it keeps. UserError for a session that has none,
        ValueError for one opened without `hidden`."""
        raise UserError(f"{self.described} has no hidden states for a drafter to read")

    def draftable(self, length: int) -> int | None:
        """Return the most tokens of a draft after `length` tokens; None: any number."""
        return None

    def read(self) -> int:
        """Read the `source`, once; return its number of tokens."""
        return 0

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """Return [B, N+1, n] logits of the ids in `reduced_ids`."""
        return self.score(rows, draft)

    def likeliest(self, row: list[int], count: int) -> dict[int, float] | None:
        """Return the `count` likeliest columns of `score_reduced` after a single row, the likeliest first, with their
        softmax; None where this is no quicker than to score. LogitsError for NaN or +inf among the logits."""
        return None

    # Further methods for sources of drafts. Their columns are the ids in `reduced_ids`.

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [B, n] after one more token of each row, [B] on the session's device: the host need not know
        them before `fill_in`. UserError unless `can_step`."""
        raise UserError(f"{self.described} reads no tokens that the host does not know")

    def fill_in(self, tokens: Rows) -> None:
        """Give the tokens of each row that the last steps read. UserError unless `can_step`."""
        raise UserError(f"{self.described} reads no tokens that the host does not know")

    def grow(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Return logits [M, n] after the last M of N nodes of a tree that follows the row just scored; earlier calls
        read the first N − M. `parents` [N] are indices in `tokens`, -1 the row. UserError unless `can_grow`."""
        raise UserError(f"{self.described} grows no trees")


class BlockSession(Session, Protocol):
    """A session that drafts several tokens in one pass."""

    by_path: bool  # whether a draft's logits depend on the drafts before it
    logits: Tensor  # [B, N, n] of the last block

    def draft_block(self, rows: Rows, count: int) -> None:
        """Run the pass for `count` drafts after each row."""

    def logits_after(self, places: list[int], paths: Rows) -> Tensor:
        """Return logits [M, n] after M paths of one length, each the last token and drafts of a row in `places`."""

    def confidence(self, places: list[int], paths: Rows) -> list[float] | None:
        """Return the estimated chance that a draft after each of M paths is accepted; None: no estimate."""


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
    block: int = 0  # the most tokens of a pass that drafts several; 0: one a pass

    def open(
        self,
        prompt: Rows,
        *,
        previous: Session | None = None,  # take over its cache (it must not be used again)
        target: Session | None = None,  # the logits are of its ids, and some models read its cache
        hidden: Hidden = False,
    ) -> Session: ...


class FormState(Protocol):
    """The tokens that can follow one text under a form, which is a grammar, JSON schema or regular expression for the
    answer. A state never changes: each text has its own.

    `forced`: the only token that can follow, None if several can. `refused` [V] bool, on the host: the ids that cannot.
    """

    @property
    def forced(self) -> int | None: ...
    @property
    def refused(self) -> Tensor:
        """Return [V] bool."""

    def after(self, token: int) -> FormState | None: ...  # with this token; None: it cannot follow, or ends the answer


class Constraint(Protocol):
    """A form for the answers of one run (sampling/constraint.py)."""

    def begin(self, rows: Rows) -> None: ...  # answers to these rows
    def at(self, prefix: list[int]) -> FormState | None: ...  # after a row; None: anything can follow
    def masked(self, logits: Tensor, prefixes: Rows, ids: Tensor | None = None) -> Tensor:
        """Return logits [..., n] of these ids (None: of all) with -inf at the refused ones."""


class Sampler(Protocol):
    """The only source of randomness: all noise is a function of the seed and a key; there is no counter."""

    constraint: Constraint | None = None  # which ids can follow a text
    biases: bool = False  # whether `biased` changes logits; if not, callers may skip it

    needs_prefixes: bool  # the distribution depends on the tokens before: `probs` reads prefixes, and logits of all ids
    point_mass: bool  # drafts are point masses (greedy drafts, gumbel coupling)
    greedy: bool = False  # the draw is the largest logit after any prefix
    filters: Filters | None = None  # if the draw is by these alone, with the noise of `noise_key`; None: it is not
    notes: bool = False  # every coin is recorded, so that none may be tossed that decides nothing
    banned: frozenset[int] = frozenset()  # the ids that are never drawn

    def noise_key(self, row: int) -> tuple[int, float]:
        """Return the 64-bit key of the noise of a row's draws, which a position extends, and the temperature; (0, 0.0)
        hides the noise."""
        return 0, 0.0

    def biased(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return logits [..., n] of these ids (None: of all) with each id's bias added. It is added once to the logits
        of every model, target and drafters."""
        return logits

    def probs(self, logits: Tensor, prefixes: Rows) -> Tensor:
        """[..., V] biased logits → [..., V] float32 processed probabilities.

        `prefixes` holds one prefix for each distribution (flattened over the leading dimensions), or is
        empty when `needs_prefixes` is False.
        """

    def draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        """[M, V] probabilities → [M] ids. Keys on the host, [M, 2]: row, position."""

    def coin(self, prob: Tensor, keys: Tensor) -> Tensor:
        """[M] probabilities → [M] bool: u < prob, never ≤.

        Keys on the host, [M, 4]: row, position, committed length at the round's start, turn among siblings.
        """

    def drafting(self, starts: Sequence[Sequence[int]]) -> Sampler:
        """Return the drafter's view in the round that begins at `starts` (row, committed length): with separate
        noise, or the target's under gumbel coupling. The view's own `drafting` returns the view of a nested round."""

    def noise(self, row: int, position: int, ids: Sequence[int]) -> list[float]:
        """Return the Gumbel noise of each id in the target's draw there, which the temperature multiplies.

        Only a drafter of point masses may read it before the draw: those never change the text. A drafter that let the
        noise decide *whether* to make a drawn draft would bias the draw after its refusal.
        """
        return [0.0] * len(ids)

    def coin_uniforms(self, keys: Tensor) -> list[float]:
        """Return the uniform number u in (0, 1) of each coin with these keys [M, 4], to display past coins."""
        return [0.0] * len(keys)


class Drafter(Protocol):
    """A way of drafting. `start` opens an answer; then each round calls `propose`, unless nothing may be drafted, and
    `observe`.

    `start` opens the drafter's own sessions but reads no prompt: the loop feeds `sessions` in
    pieces, so that an interrupt stops that too. Methods that a drafter does not need have defaults.
    """

    traits: Traits

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Return its models' sessions."""
        return ()

    @property
    def models(self) -> tuple[LM, ...]:
        """Return the models that it runs."""
        return ()

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open an answer. `target` is the outermost model's session, `verifier` that of the model which reviews this
        drafter's drafts."""
        return

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Return a draft for each row, within the budget; it may be empty."""
        return Draft.empty(len(rows))

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        """Learn from a finished round; `rows` as they were before it."""
        return

    def select(self, rows: Tensor) -> None:
        """Expand, reorder or drop rows, by the indices [B'] of those that stay."""
        return

    def considered(self, row: int, path: list[int], count: int, tokens: Sequence[int]) -> tuple[Proposal, ...]:
        """Return the `count` likeliest tokens after this path of drafts of row `row` in the last round, and those of
        `tokens` that were considered too. () if nothing was considered, or the drafter does not keep it."""
        return ()


class GammaController(Protocol):
    """Chooses how much to draft. Decides from past rounds only, and touches no drafter."""

    def budget(self, rows: list[int]) -> Budget: ...  # of the coming round, for the rows with these numbers
    def observe(self, steps: list[Step], promised: float) -> None: ...  # a Step a row, and the `Draft.promised`


@dataclass(frozen=True, slots=True)
class FixedPace:
    """The same gamma every round."""

    value: int

    def budget(self, rows: list[int]) -> Budget:
        return Budget([self.value] * len(rows))

    def observe(self, steps: list[Step], promised: float) -> None:
        return None
