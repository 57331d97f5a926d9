"""`gamma auto`: how much to draft in the next round, so that tokens come fastest.

A chain of γ tokens is expected to bring, in tokens per plain pass,

    (1 + Σ_j ∏_{i≤j} α_i) / (γ·c + v(γ+1))

and the controller takes the γ that maximises this. A best-first tree knows the probability of each node, so its budget
gives bounds and the costs of a node (:class:`sampling.types.NodeCosts`). α comes from sampling/gamma/acceptance.py, c
and v(n) from sampling/gamma/costs.py. Knows no drafter, no tokens and no clock.

**Why the text stays lossless.** The budget of a round is settled before its first draft is drawn, from rounds whose
tokens are all committed: it is a function of the prefix and of clocks. Given the prefix, a round with any budget emits
the target's distribution (`sampling/verify/rules.py`), hence so does a mixture of budgets. Stopping or continuing
because of the token under test would break this; the controller sees no draft or verdict of the running round. With
point-mass drafts and gumbel coupling the text is plain decoding's for every budget. With drafts drawn from a
distribution (`coupling rejection`) the *distribution* is unchanged, but clocks choose the budget, so one seed may give
another text next time.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from sampling.events import Step
from sampling.gamma.acceptance import Acceptance, expected_tokens
from sampling.gamma.constants import (
    ALLOWANCE,
    BATCH_GAIN,
    CREDIT,
    FIRST_DRAFTS,
    GAMMA_MAX,
    GROWTH,
    MARGIN,
    MEASURED,
    NODES_MAX,
    PROBE_ALLOWANCE,
    PROBES,
    RATE,
    REFERENCES,
    RETRY,
    TREE_ALLOWANCE,
)
from sampling.gamma.costs import Costs
from sampling.types import Budget, NodeCosts, Traits


def goodput(
    alphas: Sequence[float], c: float, v: Sequence[float], drafted: Sequence[float] | None = None
) -> list[float]:
    """Return tokens per plain pass for γ = 0 … len(alphas); `v[n-1]` is v(n), up to n = len(alphas) + 1.

    `drafted[j]` is the probability that draft j+1 comes if γ allows it (default 1); a missing draft costs no width.
    """
    chances = drafted or [1.0] * len(alphas)
    # The first draft is paid for, whether it comes or not.
    drafting = accumulate((c * chance for chance in (1.0, *chances[1:])), initial=0.0)
    verifying = accumulate((chance * (v[n] - v[n - 1]) for n, chance in enumerate(chances, start=1)), initial=v[0])
    each = zip(expected_tokens(alphas), drafting, verifying, strict=False)
    return [tokens / (draft + verify) for tokens, draft, verify in each]


def best(values: Sequence[float]) -> int:
    """Return the index of the largest value; the first of equal ones."""
    return max(range(len(values)), key=lambda index: (values[index], -index))


class Controller:
    """A :class:`sampling.types.GammaController`. One object a drafter; `begin()` opens an answer.

    *Costs unknown*: two plain passes, two rounds of one token, then drafts up to three times as long as measured.
    *Costs known*: the best plan, from the first round on.
    *Drafts do not pay*: none, and after 8 rounds a trial of one token (for a tree, of its usual nodes; for a cascade, a
    whole draft) if the account allows it; a trial that paid is followed by another.
    *The account* bounds the loss: no draft starts that, if all of it is rejected, would make all answers together cost
    more than 1.0125 × plain decoding and 1.4 passes; earlier gains count for up to 4 passes. An answer of best-first
    trees begins with .35 passes at most, or with the loss of 1.5 drafts of one token if that is more, so that what one
    answer gained is not lost in the next; a probe (a small tree that times a wider pass) may lose .7 more. The account
    is in measured costs, not in seconds, so one slow call is not charged to drafts. For best-first trees the account
    counts the calibrated promise (the sum of the probabilities of their paths) instead of the accepted tokens, whose
    chance variation would empty it where drafts gain little. A cascade drafts while the account is positive, since one
    draft may cost more than it ever holds: so it may lose one draft more.

    A batch has one budget for all rows: its pass costs what the longest draft costs, and drafts are judged by the
    slowest row, for which the others wait at the end. Costs are learned separately for each number of rows.

    Args:
        acceptance: estimates of the drafter's drafts.
        costs: measured on this machine; may outlive the controller.
        tree: drafts are best-first trees, else chains.
        most: most nodes of a round; unless `whole`, at most GAMMA_MAX, or of trees NODES_MAX. None: that number.
        whole: each draft has all `most` tokens or none (a cascade's).

    Raises ValueError if `most` is below 1.
    """

    def __init__(
        self,
        acceptance: Acceptance | None = None,
        costs: Costs | None = None,
        *,
        tree: bool = False,
        most: int | None = None,
        whole: bool = False,
    ) -> None:
        if most is not None and most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        self.acceptance = Acceptance(most if whole and most else GAMMA_MAX) if acceptance is None else acceptance
        self.costs = self._all_costs = Costs() if costs is None else costs
        self.tree, self.whole = tree, whole
        limit = NODES_MAX if tree else GAMMA_MAX
        self.most = limit if most is None else most
        self.gamma_max = self.most if whole else min(limit, self.most)
        ratios = self.acceptance.ratios
        self._rate = ratios.of("rate", RATE)
        self._calls = ratios.of("called", 1.0)  # share of drafting rounds in which the drafter runs its model
        self._drafted = ratios.of("drafted a round", 0.0, 0.0)
        self._has_model = False
        self.left = ALLOWANCE  # the account: passes that may still be lost
        self.last: int | None = None  # gamma of the last round
        self.pays = True  # whether drafts were expected to pay at the last decision
        self._rounds_since_draft = self._rounds_since_plain = 0
        self._rounds_since_model = 0  # since the drafter's model ran; since the last draft if it has none
        self._rounds_without_draft = 0  # in which the drafter was called
        self._probes = dict.fromkeys(PROBES, MEASURED)  # rounds that may still time a pass of this many nodes
        self._trial = self._trial_paid = False  # whether the last budget was a trial; whether the last trial paid
        self._tokens_by_row = Counter[int]()  # in this answer

    def begin(self) -> None:
        """Start a new answer. Costs and account stay (of trees, the account is limited); acceptance starts from the
        average of earlier answers."""
        self.acceptance.begin()
        if self.tree:
            self.left = min(self.left, max(TREE_ALLOWANCE, FIRST_DRAFTS * self._loss(1)))
        self._trial_paid = False
        self._tokens_by_row.clear()

    # -- choosing -----------------------------------------------------------------------------

    def budget(self, rows: list[int]) -> Budget:
        """Return the budget of the coming round, the same for all rows."""
        self.costs = self._all_costs.of(len(rows))
        wanted = self._wanted(len(rows))
        known, costs, price = self.costs.drafting_known, None, None
        probe = self._probe() if wanted and known and self.tree and len(rows) == 1 else 0
        self.last = gamma = min(wanted, max(self._affordable(wanted), probe))
        if wanted and not self._trial:
            self.pays = gamma > 0 and not (self._has_model and self._rounds_without_draft >= RETRY)
        if not gamma:
            return Budget([0] * len(rows))
        rate = self._rate.value
        if known and self.tree and not probe:
            costs = NodeCosts(self.costs.v(gamma + 1), self.acceptance.calibration.value, rate)
        if known and self._has_model:
            price = self.costs.model_cost * rate
        return Budget([gamma] * len(rows), (probe or gamma) if self.tree else None, costs, price)

    def _probe(self) -> int:
        """Return the nodes of a tree that times a pass, 0 for none.

        Costs that were given, or measured on a busier machine, may exclude every node: then no pass would correct them.
        """
        doubted = self._trial or self._rounds_without_draft > 0 or self.left >= TREE_ALLOWANCE / 2
        for nodes, rounds in self._probes.items():
            due = rounds > 0 and doubted and not self.costs.timed(nodes + 1)
            ignored = nodes <= PROBES[0] and self._rounds_without_draft >= RETRY
            if (due or ignored) and nodes <= self.most and self._loss(nodes) <= self.left + PROBE_ALLOWANCE:
                self._probes[nodes] -= 1
                return nodes
        return 0

    def _wanted(self, rows: int) -> int:
        """Return the tokens of the coming round before the account limits them."""
        self._trial = False
        references = self.costs.references
        due = self._rounds_since_plain >= REFERENCES[min(references, len(REFERENCES) - 1)]
        if due and (references > 0 or self.costs.reach == 1 or self.costs.borrowed):
            return 0
        if not self.costs.drafting_known:
            return self._smallest
        if gamma := self._best(rows):
            return gamma
        self.pays = False
        self._trial = (self._trial_paid and rows == 1) or self._rounds_since_draft >= rows * RETRY
        return self._smallest if self._trial else 0

    def _best(self, rows: int) -> int:
        """Return the number of tokens with most expected tokens per plain pass; 0 if none beats plain decoding. For a
        tree of one row the most that it may have."""
        if self.tree and rows == 1:  # the builder weighs each node by its probability
            return self.reach
        rates = self.expected(self.reach)
        gamma = max(
            [0, self.gamma_max] if self.whole else range(self.reach + 1), key=lambda depth: (rates[depth], -depth)
        )
        return gamma if rates[gamma] > rates[0] * (BATCH_GAIN if rows > 1 else 1.0) else 0

    def expected(self, limit: int) -> list[float]:
        """Return expected tokens per plain pass for 0 … `limit` drafted tokens."""
        c = (self._calls.value if self._has_model else 1.0) * self.costs.c  # mean of rounds with the model and without
        return goodput(self.acceptance.alphas[:limit], c, self.costs.v(limit + 1), self.acceptance.drafted[:limit])

    @property
    def _smallest(self) -> int:
        """The tokens of a trial, and of the rounds that measure costs."""
        return self.reach if self.whole or (self.tree and self.costs.drafting_known) else 1

    @property
    def reach(self) -> int:
        """The longest draft allowed now: costs of much wider passes than the measured ones are unknown."""
        return self.gamma_max if self.whole else min(self.gamma_max, max(1, GROWTH * (self.costs.reach - 1)))

    @property
    def _draft_cost(self) -> float:
        """The passes that a drafted token costs in the coming round."""
        return self.costs.waking if self._rounds_since_model > 1 else self.costs.c

    def _loss(self, nodes: int) -> float:
        """Return the passes lost if a whole draft of this many nodes is rejected."""
        # a best-first tree costs c once
        return (min(nodes, 1) if self.tree else nodes) * self._draft_cost + self.costs.v(nodes + 1)[-1] - 1

    def _affordable(self, wanted: int) -> int:
        """Return the most of `wanted` tokens whose loss the account allows."""
        left = self.left + MARGIN
        if self.whole:  # one may cost more than the account holds: it is allowed while the account is positive
            return wanted if left > 0 else 0
        if self._loss(wanted) <= left:
            return wanted
        return bisect(range(1, wanted), left, key=self._loss)  # the loss never falls with the nodes

    # -- learning -----------------------------------------------------------------------------

    def observe(self, steps: list[Step], promised: float = 0.0) -> None:
        """Learn from a round: the Step of each row, and the tokens that a best-first tree promised."""
        allowed = drafted = 0
        draft_s = verify_s = sample_s = model_s = 0.0
        passes = 0  # of the drafter's model
        for step in steps:
            allowed, drafted = max(allowed, step.gamma), max(drafted, len(step.drafted))
            draft_s, verify_s = draft_s + step.draft_s, verify_s + step.verify_s
            sample_s += step.sample_s + step.overhead_s  # longer in rounds with drafts
            own = step.calls[:-1]  # the last is the target's
            passes = max(passes, sum([call.passes for call in own])) if own else passes
            model_s += sum([call.seconds for call in own]) if own else 0.0
        slowest, ran_model = steps[0] if len(steps) == 1 else self._slowest(steps), passes > 0
        tokens = len(slowest.path) + (slowest.token is not None)
        self._has_model = self._has_model or ran_model
        paid = (1 if self.tree else max(1, drafted)) if allowed and ran_model >= self._has_model else 0
        pass_s = model_s / passes if passes else 0.0
        further_s = pass_s * (passes - 1) if passes and self.tree else 0.0
        idle = self._rounds_since_model if self.costs.drafting_known else self._rounds_since_draft
        self.costs.add(drafted + 1, paid, idle, draft_s - further_s, verify_s, pass_s, sample_s)
        expected = 1 + self.acceptance.calibration.value * promised if promised else float(tokens)
        self._charge(tokens, expected, drafted, paid, draft_s if allowed else 0.0, further_s, verify_s)
        self._rounds_since_model = 0 if (ran_model if self._has_model else allowed) else self._rounds_since_model + 1
        if self.tree and len(steps) == 1:
            # a round that promised nothing moves the ratio towards its prior: no drafter is dropped forever
            self.acceptance.calibration.learn(len(slowest.path) if promised else 0, promised)
        self._rounds_since_plain = 0 if drafted == 0 else self._rounds_since_plain + 1
        if allowed == 0:
            self._rounds_since_draft += 1
            return
        self._rounds_since_draft = 0
        self._rounds_without_draft = 0 if drafted else self._rounds_without_draft + 1
        self._drafted.learn(drafted)
        if self._has_model:
            self._calls.learn(float(ran_model))
        self.acceptance.learn(slowest, allowed, steps)
        if self._trial:
            self._trial_paid = tokens > paid * self.costs.c + self.costs.v(drafted + 1)[-1]

    def _charge(
        self, tokens: int, expected: float, drafted: int, paid: int, draft_s: float, further_s: float, verify_s: float
    ) -> None:
        """Book a round: the cost of plain decoding for the expected tokens, less the cost of the round."""
        width = self.costs.v(drafted + 1)[-1]
        if (plain := self.costs.plain) and not self.costs.timed(drafted + 1):
            width = min(width, verify_s / plain)
        cost = paid * self._draft_cost + width
        if plain:
            cost += further_s / plain
            if draft_s and not paid:  # without its model the drafter still looks tokens up
                cost += min(self.costs.c, draft_s / plain)
        stake = max(1.0, self._loss(self._smallest)) if self.whole else 1.0
        self.left = min(self.left + (1 + MARGIN) * expected - cost, CREDIT * stake)
        self._rate.learn(tokens, cost)

    def _slowest(self, steps: list[Step]) -> Step:
        """Return the step of the row with the fewest tokens, for which the others wait at the end."""
        slowest = min(steps, key=lambda step: self._tokens_by_row[step.row])
        for step in steps:
            self._tokens_by_row[step.row] += len(step.emitted)
        return slowest

    # -- what others see ----------------------------------------------------------------------

    @property
    def mean_drafted(self) -> float | None:
        """Mean number of drafted tokens in the latest drafting rounds; None before the first."""
        try:
            return self._drafted.value
        except ZeroDivisionError:
            return None


def controller_of(
    traits: Traits, nodes: int, costs: Costs | None = None, acceptance: Acceptance | None = None
) -> Controller:
    """Build the controller for a drafter whose rounds may have this many nodes."""
    if traits.most is not None:
        limited = Acceptance(traits.most, ratios=None if acceptance is None else acceptance.ratios)
        return Controller(limited, costs, most=traits.most, whole=True)
    return Controller(acceptance, costs, tree=traits.tree, most=nodes if traits.tree else None)
