"""Drafters made of drafters: chains, and cascades, in which a model reviews drafts before the target does.

A member drafts or reviews. It may be used several times (a cascade of three uses its smallest model under the middle
one and beside it), but is started, observed and selected once. In a chain each member drafts after the one before it,
cheaper members for later positions, which are reached less often: the horizontal cascade of Cascade Speculative
Drafting (Chen et al., arXiv 2312.11462, section 3.3). In its vertical cascade (section 3.2) the reviewer runs rounds as
a target does, may be lenient, and passes up the distribution that its tokens really have (sampling/verify/rules.py).
:func:`cascade_of` builds one drafter of drafters, large to small, a K matrix (how many tokens each drafter adds for
each reviewer) and a lenience (algorithm 1). A cascade knows neither the drafter below nor the target above.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.draft_model import ModelDrafter, scoring
from sampling.drafters.drawing import ReducedSampler
from sampling.drafters.registry import DraftRequest, Parts
from sampling.events import Call, Step, by_row
from sampling.rows import check_rows, padded, prepended, put
from sampling.types import (
    LM,
    Budget,
    Draft,
    Drafter,
    DraftTree,
    Rows,
    Rule,
    Sampler,
    Session,
    Traits,
    Verdict,
    states_of,
)
from sampling.verify.distributions import one_hot
from sampling.verify.round_metrics import Seconds, facts_on, step_of
from sampling.verify.rules import Keys, Review, review
from sampling.vocabulary import spread
from utils.catalogue.specs import Matrix, check_fit, check_lenience
from utils.errors import UsageError, UserError
from utils.timing import Stopwatch


def joint_traits(parts: Sequence[Drafter]) -> Traits:
    """Return the traits of drafters together. Their rule is the highest, under which point masses are distributions.

    UserError, with its name, for a part that reads the target's noise beside drawn drafts: the token after a rejection
    is drawn with that noise, which must not have chosen the rejected one.
    """
    traits = [part.traits for part in parts]
    rule = max((part.rule for part in traits), default=Rule.POINT)
    for part in traits:
        if rule is not Rule.POINT and part.shared_noise:
            raise UserError(f"{', '.join(part.names)}: shared_noise must be False beside drafters that draw")
    return Traits(
        names=tuple(dict.fromkeys(name for part in traits for name in part.names)),
        rule=rule,
        needs_hidden=states_of(*(part.needs_hidden for part in traits)),
        needs_kv=any(part.needs_kv for part in traits),
    )


class Composite(Drafter):
    """A drafter made of others. `members`: the parts, each once, with a composite's members in its place. Its names are
    theirs, each once."""

    members: tuple[Drafter, ...]

    def __init__(self, parts: Sequence[Drafter]) -> None:
        nested = [part.members if isinstance(part, Composite) else (part,) for part in parts]
        self.members = tuple({id(member): member for members in nested for member in members}.values())
        self.traits = joint_traits(self.members)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(session for member in self.members for session in member.sessions)

    @property
    def models(self) -> tuple[LM, ...]:
        return tuple(model for member in self.members for model in member.models)

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        """Open the answer. Each member gets the outermost reviewer as `verifier`, since it may have several."""
        for member in self.members:
            check_rows(member.traits, prompt)
            member.start(prompt, target, verifier)

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        for member in self.members:
            member.observe(rows, draft, verdict)

    def select(self, rows: Tensor) -> None:
        for member in self.members:
            member.select(rows)

    def numbered(self, part: Drafter) -> list[int]:
        """Return the sources of a part's drafts as indices into `traits.names`; then that of forced tokens."""
        return [*map(self.traits.names.index, part.traits.names), len(self.traits.names)]


_ALL = 1 << 30  # tokens of a call that only the budget limits


class Growing:
    """A draft that grows from pieces; `rows` [B] are the committed tokens, `tokens` [B] the drafted ones."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.calls = rows, list[Call]()
        self.tokens: Rows = [[] for _ in rows]
        self._source: Rows = [[] for _ in rows]
        self._draft_prob: list[list[float]] = [[] for _ in rows]
        self._pieces: list[tuple[Draft, list[tuple[int, int, int]]]] = []  # row, node there, depth here
        self._trace: list[Step] = []

    def append(self, draft: Draft, numbers: Sequence[int], cut: Sequence[int]) -> list[int]:
        """Add a piece to each row, at most cut[b] tokens; return how many each row gained.

        `numbers[i]` is the number of the piece's source i here. Its calls and trace are added.
        """
        gained = [min(len(tree.tokens), max(0, most)) for tree, most in zip(draft.trees, cut, strict=True)]
        where = [(row, node, len(self.tokens[row]) + node) for row, new in enumerate(gained) for node in range(new)]
        for row, (tree, count) in enumerate(zip(draft.trees, gained, strict=True)):
            self.tokens[row] += tree.tokens[:count]
            self._source[row] += [numbers[source] for source in tree.source[:count]]
            self._draft_prob[row] += tree.draft_prob[:count]
        if where:
            self._pieces.append((draft, where))
        self.calls += draft.calls
        self._trace += [renumbered(step, numbers) for step in draft.trace]
        return gained

    def draft(self) -> Draft:
        """Return the draft. Point masses beside distributions become distributions [B, N, V]; calls are added up by
        model."""
        spent: dict[str, Call] = {}
        for call in self.calls:
            known = spent.get(call.model, Call(call.model, 0, 0.0))
            spent[call.model] = Call(call.model, known.passes + call.passes, known.seconds + call.seconds)
        return Draft(
            list(map(DraftTree.of, self.tokens, repeat(None), self._source, self._draft_prob)),
            self._probs(),
            tuple(spent.values()),
            tuple(self._trace),
        )

    def _probs(self) -> Tensor | None:
        like = next((draft.probs for draft, _ in self._pieces if draft.probs is not None), None)
        if like is None:
            return None
        probs = like.new_zeros(len(self.tokens), max(map(len, self.tokens)), like.shape[-1])
        for draft, where in self._pieces:
            rows, nodes, depths = put(where, probs.device).unbind(1)
            if draft.probs is None:
                probs[rows, depths] = one_hot(put(padded(draft.tokens), probs.device)[rows, nodes], probs)
            else:
                probs[rows, depths] = draft.probs.to(probs)[rows, nodes]
        return probs


def renumbered(step: Step, numbers: Sequence[int]) -> Step:
    """Return a nested round with its sources, at every level, renumbered."""
    inner = tuple(renumbered(nested, numbers) for nested in step.inner)
    return replace(step, source=tuple(numbers[index] for index in step.source), inner=inner)


class Stage(NamedTuple):
    """One part of a chain. `tokens`: how many it adds at least; `call`: how many a call requests, None = all missing
    ones; `over`: how many more than the missing ones a call may bring."""

    drafter: Drafter
    tokens: int
    call: int | None = None
    over: int = 0


class ChainDrafter(Composite):
    """Stages that draft one after the other, each until the chain has the sum of the `tokens` up to it.

    A stage that brings nothing is skipped, and so is one whose tokens the stages before it brought already.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__([stage.drafter for stage in stages])
        self.stages = tuple(stages)
        # A stage that lacks a single token may bring `over` more than that one.
        totals = accumulate(stage.tokens for stage in stages)
        longest = (total + stage.over for total, stage in zip(totals, stages, strict=True) if total)
        self.traits = replace(self.traits, most=max(longest, default=0))

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Return chains of at most budget.max_depth[b] tokens; the budget only cuts."""
        grown = Growing(rows)
        for stage, total in zip(self.stages, accumulate(stage.tokens for stage in self.stages), strict=True):
            self._extend(grown, stage, [min(total, most) for most in budget.max_depth], budget.max_depth, sampler)
        return grown.draft()

    def _extend(self, grown: Growing, stage: Stage, until: list[int], most: list[int], sampler: Sampler) -> None:
        """Run one stage until every row has its tokens or gets no more."""
        active, bounds = [True] * len(until), until if stage.call is None else most
        while True:
            have = [len(tokens) for tokens in grown.tokens]
            active = [own and has < goal for own, has, goal in zip(active, have, until, strict=True)]
            if not any(active):
                return
            each = zip(active, bounds, have, strict=True)
            call = _ALL if stage.call is None else stage.call
            wanted = [min(call, bound - has) if own else 0 for own, bound, has in each]
            draft = stage.drafter.propose(prepended(grown.rows, grown.tokens), Budget(wanted), sampler)
            gained = grown.append(draft, self.numbered(stage.drafter), wanted)
            active = [own and bool(new) for own, new in zip(active, gained, strict=True)]


class CascadeDrafter(Composite):
    """A drafter in which `inner` drafts, and `reviewer` reviews once a proposal and adds its own token.

    Args:
        reviewer: a drafter whose model reviews, token by token. By its rule the target verifies the tokens that are
            passed up.
        inner: any drafter; in a cascade of three the largest's is a chain of a cascade and the smallest drafter.
        lenience: λ ≥ 1 of the review; the target's own review is exact for every λ.
    """

    def __init__(self, reviewer: ModelDrafter, inner: Drafter, lenience: float = 1.0) -> None:
        self.model, self.inner, self.lenience = reviewer.model, inner, check_lenience(lenience)
        super().__init__((reviewer, inner))

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        """Return at most budget.max_depth[b] tokens for row b, at least one if that is above 0 and the reviewer's
        context has room: the inner drafts that the reviewer accepts, then its own token.

        Distributions, if drafts have them, are those that the tokens really have. `trace` holds the review, a Step for
        each row that was reviewed.
        """
        model, session, share = self.model, self.model.session, len(rows)
        depth = model.fitting(rows, budget.max_depth)
        if session is None or max(depth) <= 0:
            return Draft.empty(share)
        watch = Stopwatch()
        keys = [(number, len(row)) for number, row in zip(model.ids, rows, strict=True)]
        going = [index for index, most in enumerate(depth) if most > 0]
        draft = self.inner.propose(rows, Budget([max(0, most - 1) for most in depth]), sampler.drafting(keys))
        draft_s = watch.lap()
        result, seen, ids = self.review(rows, draft, keys, going, sampler, session)
        calls, numbers = (*draft.calls, Call(model.lm.name, 1, watch.lap())), self.numbered(self.inner)
        each, inner = tuple(call.shared(share) for call in calls), by_row(draft.trace)
        timed = Seconds(draft_s / share, each[-1].seconds, 0.0, 0.0)
        steps, width = list[Step](), draft.width  # the reviews as nested rounds, for display
        for index in going:
            row, token, path = model.ids[index], result.verdict.token[index], result.verdict.path[index]
            own, facts = token if ids is None else int(ids[token]), facts_on(result.verdict, index, [-1, *path])
            step = step_of(seen.trees[index], path, own, facts, draft.probs is None, row, width, each, timed)
            step = replace(step, drafted=tuple(draft.trees[index].tokens), inner=tuple(inner.get(row, ())))
            steps.append(renumbered(step, numbers))
        return replace(_emitted(result, draft, ids, numbers, session.vocab_size), calls=calls, trace=tuple(steps))

    def review(
        self, rows: Rows, draft: Draft, keys: Keys, going: list[int], sampler: Sampler, session: Session
    ) -> tuple[Review, Draft, Tensor | None]:
        """Review the rows `going`; return the review, the draft as reviewed, and the ids [n] covered (None: all), by
        whose indices the tokens of both are then numbered.

        `keys` are those of all rows. The other rows draw nothing: they would draw the same noise again later.
        """
        score, ids = scoring(session, whole=sampler.needs_prefixes)
        logits = score([row[: self.model.lm.context] for row in rows], draft)  # cut rows have no drafts
        if ids is not None:
            logits = F.pad(logits, (0, 1), value=-torch.inf)  # the last column: every id that is not covered
            draft, sampler = _covered(draft, ids), ReducedSampler(sampler, ids, session.vocab_size)
        result = review(sampler.biased(logits), draft, rows, keys, sampler, self.lenience, going)
        session.commit(result.verdict.path)
        return result, draft, ids


def _covered(draft: Draft, ids: Tensor) -> Draft:
    """Renumber the draft by the ids covered: token i is ids[i], len(ids) means any other id."""
    columns = {token: index for index, token in enumerate(ids.tolist())}
    if (probs := draft.probs) is not None:
        # The q of an id that is not covered never matters: the reviewer gives it no probability.
        probs = F.pad(probs.to(ids.device).index_select(-1, ids), (0, 1), value=1.0)
    trees = [replace(tree, tokens=[columns.get(token, len(ids)) for token in tree.tokens]) for tree in draft.trees]
    return replace(draft, trees=trees, probs=probs)


def _emitted(result: Review, draft: Draft, ids: Tensor | None, numbers: list[int], vocab_size: int) -> Draft:
    """Return the tokens that a review passes up, at most N+1 a row: accepted drafts, then the reviewer's own token.

    Sources are numbered as the cascade does: 0 is the reviewer, `numbers` has the numbers of the inner ones.
    """
    verdict, covered = result.verdict, None if ids is None else ids.tolist()
    probs, logits = result.probs, verdict.logits.float()
    if probs is not None and ids is not None:
        probs = spread(probs[..., :-1], ids, vocab_size, 0.0)
    columns, trees = list[list[int]](), list[DraftTree]()
    for tree, path, token in zip(draft.trees, verdict.path, verdict.token, strict=True):
        own = [] if token < 0 else [token if covered is None else covered[token]]
        tokens = [*tree.path_tokens(path), *own]
        columns.append(tokens if ids is None else torch.searchsorted(ids.cpu(), torch.tensor(tokens)).tolist())
        trees.append(DraftTree.of(tokens, None, [*(numbers[tree.source[node]] for node in path), *[0] * len(own)]))
    at = put(padded(columns, 0, logits.shape[1]), logits.device).clamp(max=logits.shape[-1] - 1)
    raw = (logits.gather(2, at[..., None])[..., 0] - logits.logsumexp(dim=-1)).exp().tolist()
    trees = [replace(tree, draft_prob=each[: len(tree.tokens)]) for tree, each in zip(trees, raw, strict=True)]
    return Draft(trees, None if probs is None else probs[:, : max(len(tree.tokens) for tree in trees)])


def cascade_of(drafters: Sequence[Drafter], matrix: Any, lenience: float = 1.0) -> ChainDrafter:
    """Build the cascade of `drafters`, large to small, by the K matrix; λ = `lenience` holds between them only.

    All but the last review: models, or model drafters, whose models review. A last one that is a
    :class:`ModelDrafter` drafts as many tokens as are missing, any other K's last entry at a time. A cascade ignores
    gamma: a proposal has up to `traits.most` tokens, and a budget only cuts it.

    Raises:
        UserError: no drafter, a matrix that does not fit, λ < 1, or a drafter that cannot review before the last.
    """
    if not drafters:
        raise UserError("a cascade needs at least one drafter")
    k, lenience = check_fit(matrix, len(drafters)), check_lenience(lenience)
    *reviewers, last = drafters
    call = None if isinstance(last, ModelDrafter) else k[-1][-1] or None
    stages = [Stage(last, 0, call, 0 if call is None else call - 1)]
    for index in range(len(reviewers) - 1, -1, -1):
        below = _chain(stages, k, index + 1)
        cascade = CascadeDrafter(_reviewer(reviewers[index]), below, lenience)
        stages.insert(0, Stage(cascade, 0, _ALL, below.traits.most or 0))
    return _chain(stages, k, 0)


def chain_of(drafters: Sequence[Drafter], amounts: Sequence[int]) -> ChainDrafter:
    """Build a chain in which drafter i adds amounts[i] tokens to those before it; only the target reviews.

    ValueError for another number of amounts.
    """
    return ChainDrafter([Stage(drafter, amount) for drafter, amount in zip(drafters, amounts, strict=True)])


def _chain(stages: Sequence[Stage], k: Matrix, reviewer: int) -> ChainDrafter:
    """Return the chain below `reviewer` (0 = the target): the drafters after it, with the tokens of its row."""
    return ChainDrafter(
        [stage._replace(tokens=tokens) for stage, tokens in zip(stages, k[reviewer][reviewer:], strict=True)]
    )


def _reviewer(drafter: Any) -> ModelDrafter:
    """Return a model drafter itself, or a new one of a model (any LM). UserError for a drafter that cannot review."""
    drafter = ModelDrafter(drafter) if hasattr(drafter, "open") else drafter
    if not isinstance(drafter, ModelDrafter):
        name = next(iter(getattr(drafter, "traits", Traits()).names), type(drafter).__name__)
        raise UserError(f"{name} is no model and cannot review drafts: only the last drafter of a cascade may be one")
    if not drafter.lm.reviews:
        why = "it has no states but its target's" if drafter.lm.reads_hidden else "its tokens are not the target's"
        raise UserError(f"{drafter.lm.name} cannot review drafts ({why}): only the last can be one")
    return drafter


def build(pair: Parts, request: DraftRequest) -> ChainDrafter:
    """Build the pair's cascade, or the chain of its drafters; UsageError for drafters or a matrix that make none."""
    members, matrix, lenience = pair.cascade(request)
    try:
        return cascade_of(members, matrix, lenience) if request.word == "cascade" else chain_of(members, matrix[0])
    except UserError as error:
        raise UsageError(f"lane {request.word}: {error}") from error
