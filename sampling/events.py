"""The events of decoding: frozen records of plain values, and the beams that result from the steps of a search.

The loop yields these; the log writer, the figures and the screen see nothing else. Every record is JSON-able
(:func:`to_json`). A beam search's steps have only the token by which each beam grew; :class:`BeamTree` assembles the
sequences, for the search itself, the figures and the screen. Knows no text, no tensors and no torch.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from utils.objects import Json
from utils.remote.pieces import ServerFigures

GRAMMAR = "grammar"  # the name of the source after a drafter's own: tokens that a constraint forces

Reason = Literal["eos", "stop", "length", "interrupted"]


class Call(NamedTuple):
    """Forward passes of one model within a round; `seconds` is device-synchronised wall time.

    `confidence`: the chance of acceptance at each depth, if the drafter estimates it; the draft ends at the first one
    that is too small.
    """

    model: str
    passes: int
    seconds: float
    confidence: tuple[float, ...] = ()

    def shared(self, rows: int) -> "Call":
        """Return one row's share of a call for `rows` rows."""
        return self._replace(seconds=self.seconds / rows)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A piece of the prompt was read: `done` of `total` tokens (of the longest row) are cached.

    `seconds` is the compute of this piece.
    """

    done: int
    total: int
    seconds: float


class Likely(NamedTuple):
    """An alternative token of the target at a position.

    `p` is its probability at temperature 1, `processed` that in the distribution of the draw, `rank` counts from 1
    by `p`; `noise` is the Gumbel noise of the draw: the largest log processed + noise wins (0 in greedy decoding).
    """

    token: int
    p: float
    processed: float
    rank: int
    noise: float


class Proposal(NamedTuple):
    """A token that the drafter considered: `q` as in `Step.draft_p`, `rank` by it from 1, and its source."""

    token: int
    q: float
    rank: int
    source: int


# Of typical acceptance: ε and δ as published (Medusa, Cai et al., arXiv 2401.10774).
EPSILON, DELTA = 0.09, 0.3
# The β = 1/T at which a position may keep the sum over the tokens that it does not name.
INVERSE_TEMPERATURES = (0.0, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
ENOUGH = 20  # a position with at least this many alternatives keeps that sum


class Filters(NamedTuple):
    """The distribution of a draw: the softmax of biased logits at a temperature (0: the largest logit alone), of which
    top-k, then top-p, then min-p keep a part; by default they keep all of it."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Position(NamedTuple):
    """The alternatives of an emitted token, the likeliest first; it and the drafts examined there are among `target`.

    `entropy` is that of the target's distribution at temperature 1, in bits. `rest`, which is optional, is log Σ p^β
    over all tokens that are not among `target`, at temperature 1 and for each β of `INVERSE_TEMPERATURES`.
    """

    target: tuple[Likely, ...]
    drafter: tuple[Proposal, ...]
    entropy: float
    rest: tuple[float, ...] = ()

    def trimmed(self, count: int, needed: Collection[int]) -> "Position":
        """Return the position with `count` alternatives of target and drafter, and those of `needed`."""
        target = tuple(each for at, each in enumerate(self.target) if at < count or each.token in needed)
        drafter = tuple(each for at, each in enumerate(self.drafter) if at < count or each.token in needed)
        return self._replace(target=target, drafter=drafter, rest=self.rest if count >= ENOUGH else ())


class Odds(NamedTuple):
    """A draft's probabilities at temperature 1, examined or not: the target's and the drafter's."""

    p: float
    q: float


class Trial(NamedTuple):
    """The examination of draft `node`, which is accepted with this chance: with a coin, if the uniform `number` in
    (0, 1) is less; without one (`number` None), if the target draws the draft's token. Under a rule that tosses coins,
    a draft without one has chance 0.

    `p` and `q` are the token's probabilities after all settings: the target's (for a coin, in the residual that refused
    siblings left) and the drafter's (1 for a point mass). Both are None in greedy decoding, `q` also under the
    point-mass rule."""

    node: int
    chance: float
    number: float | None
    p: float | None = None
    q: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One round of one row. The first Step of a row is its opening round: nothing is drafted.

    `drafted` are the proposed tokens in draft order and `parents[i]` the index of node i's parent
    (-1: the committed prefix; a chain is -1, 0, 1 …). `path` indexes into `drafted`: the accepted
    nodes. `token` is the target's own token (correction or bonus), or None when the row ended with an
    accepted draft. `target_p` and `draft_p` are temperature-1 probabilities p(x) and q(x) of
    the *examined* nodes in examination order: the accepted ones, then the refused ones (`rejected`).
    `top2_gap` is the gap of the target's two best logits where the round ended. If it is None, the Step is a piece of
    text from a server, `token` the piece's id, and `target_p` the piece's own probability where the server gives that;
    or it adds, without a pass, an id of a token that a stop string cuts (sampling/stops.py).
    All seconds are divided evenly among the rows that were active in the round; `overhead_s` is the time of the loop
    itself beside drafting, verifying and sampling. `chosen`: the drafts were not drawn but chosen, and each is
    accepted with the chance that the target draws it, for any `draft_p` (unless acceptance is typical).
    `inner` are the reviews of a cascade in this round. `positions`, one for each emitted token, `odds`, one for each
    draft, and `trials`, in examination order, are optional.
    """

    row: int
    gamma: int
    drafted: tuple[int, ...]
    parents: tuple[int, ...]
    source: tuple[int, ...]
    path: tuple[int, ...]
    token: int | None
    target_p: tuple[float, ...]
    draft_p: tuple[float, ...]
    top2_gap: float | None
    calls: tuple[Call, ...]
    draft_s: float
    verify_s: float
    sample_s: float
    inner: "tuple[Step, ...]" = ()
    overhead_s: float = 0.0
    chosen: bool = False
    positions: tuple[Position, ...] = ()
    trials: tuple[Trial, ...] = ()
    odds: tuple[Odds, ...] = ()

    @property
    def accepted(self) -> tuple[int, ...]:
        """Return the accepted draft tokens, in order."""
        return tuple(self.drafted[i] for i in self.path)

    @property
    def emitted(self) -> tuple[int, ...]:
        """Return the tokens that this round appended to the row: accepted drafts, then the target's own."""
        return self.accepted if self.token is None else (*self.accepted, self.token)

    @property
    def rejected(self) -> tuple[int, ...]:
        """Return the indices of refused nodes: of a chain at most one, of a tree the children of the last
        accepted node."""
        last = self.path[-1] if self.path else -1
        return () if self.token is None else tuple(i for i, parent in enumerate(self.parents) if parent == last)

    @property
    def discarded(self) -> tuple[int, ...]:
        """Return the indices of all other drafts, which count as never examined."""
        seen = {*self.path, *self.rejected}
        return tuple(i for i in range(len(self.drafted)) if i not in seen)

    @property
    def branch(self) -> tuple[int, ...]:
        """Return the indices of the best refused branch: the first refused node and the first children after it.

        In a chain these are the refused draft and all discarded ones.
        """
        nodes = list(self.rejected[:1])
        for node, parent in enumerate(self.parents):  # parents come before their children
            if nodes and parent == nodes[-1]:
                nodes.append(node)
        return tuple(nodes)

    @property
    def is_tree(self) -> bool:
        """Return whether a node has siblings."""
        return any(parent != i - 1 for i, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Return the depth of every node, 0 for children of the committed prefix."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def length(self) -> int:
        """Return the number of nodes on the longest path."""
        return max(self.depths, default=-1) + 1

    @property
    def seconds(self) -> float:
        """Return the compute of the whole round, in seconds."""
        return self.draft_s + self.verify_s + self.sample_s + self.overhead_s


Fate = Literal["kept", "finished", "dropped", "merged"]


class Beam(NamedTuple):
    """A candidate of a beam search: beam `parent` of the step before, grown by `token`.

    `parent` is an index into the beams that the step before kept (0 in the first step: the prompt). `log_p` is Σ log p
    of the whole answer so far, `score` is `log_p` with the length penalty. A "merged" candidate is the same answer
    as a better one, with another stop id.
    """

    parent: int
    token: int
    log_p: float
    score: float
    fate: Fate


@dataclass(frozen=True, slots=True)
class BeamStep:
    """One step of a beam search: one pass over all running beams.

    `beams` are its candidates, best first: every one that was kept, finished or merged, and of those dropped as many
    as make 2 `num_beams`. All seconds are the whole step's.
    """

    row: int
    num_beams: int
    beams: tuple[Beam, ...]
    calls: tuple[Call, ...]
    verify_s: float
    sample_s: float
    overhead_s: float = 0.0

    @property
    def kept(self) -> tuple[Beam, ...]:
        """Return the beams that stay, best first."""
        return tuple(beam for beam in self.beams if beam.fate == "kept")

    @property
    def seconds(self) -> float:
        """Return the compute of the whole step, in seconds."""
        return self.verify_s + self.sample_s + self.overhead_s


def by_row(steps: Iterable[Step]) -> dict[int, list[Step]]:
    """Group steps by their row, in order."""
    groups: dict[int, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.row, []).append(step)
    return groups


@dataclass(frozen=True, slots=True)
class Finished:
    """A row ended: by a stop token or stop string, at its length or context limit, or by an interrupt.

    `report`: the figures that a server gives with its answer.
    """

    row: int
    reason: Reason
    report: ServerFigures | None = None


Event = Prefill | Step | BeamStep | Finished

KINDS: dict[str, type[Prefill | Step | BeamStep | Finished]] = {
    "prefill": Prefill,
    "step": Step,
    "beamstep": BeamStep,
    "finished": Finished,
}


def to_json(event: Event) -> Json:
    """Return a plain dict with the record's kind under `event`; tuples become lists in JSON."""
    row = {"event": type(event).__name__.lower(), **asdict(event)}
    if isinstance(event, Step):
        row["positions"] = [position if position.rest else position[:3] for position in row["positions"]]
    return row


class Hypothesis(NamedTuple):
    """A beam with all its tokens (a closing stop id included). `score` is `log_p` with the length penalty."""

    tokens: tuple[int, ...]
    log_p: float
    score: float
    finished: bool


class BeamTree:
    """The beams after the steps so far. Both lists are ordered best first."""

    def __init__(self) -> None:
        self.running = [Hypothesis((), 0.0, 0.0, False)]
        self.finished: list[Hypothesis] = []

    def add(self, step: BeamStep) -> None:
        """Grow by one step. Finished beams keep their score; equal scores keep the order in which they finished."""
        before, self.running = self.running, []
        for beam in step.beams:
            grown = (*before[beam.parent].tokens, beam.token)
            if beam.fate == "kept":
                self.running.append(Hypothesis(grown, beam.log_p, beam.score, False))
            elif beam.fate == "finished":
                self.finished.append(Hypothesis(grown, beam.log_p, beam.score, True))
        self.finished.sort(key=lambda beam: -beam.score)

    def close(self) -> None:
        """End the search: running beams are dropped, unless none has finished."""
        if self.finished:
            self.running = []

    @property
    def best(self) -> Hypothesis:
        """Return the answer so far, of equal scores the finished one; empty before the first step."""
        return max([*self.finished, *self.running], key=lambda beam: beam.score)
