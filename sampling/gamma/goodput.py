"""Goodput: how many tokens to draft a round so that tokens come fastest (`gamma auto`).

Takes the gamma in 0 … gamma_max that maximises

    (1 + Σ_j ∏_{i≤j} α_i) / (γ·c + v(γ+1))

with α, c and v(n) learned from past rounds (sampling/gamma/acceptance_estimate.py, sampling/gamma/costs.py). Knows no
drafter, no tokens and no clock.

**Why the text stays lossless.** Gamma for a round is settled before its first draft is drawn, from
rounds whose tokens are all committed: a function of the prefix and of clocks. Given the prefix a round
with any gamma emits the target's distribution (`sampling/verify/rules.py`), hence so does a mixture of gammas that
the prefix chose. What would break it is to stop or go on because of the very token being tested; no
draft or verdict of the running round is seen here. With point-mass drafts and gumbel coupling the
text is plain decoding's for every gamma. With drafts drawn from a distribution (`coupling rejection`) the
*distribution* is unchanged, but clocks choose gamma, so that one seed may give another draw next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sampling.events import Step
from sampling.gamma.acceptance_estimate import Acceptance, expected_tokens
from sampling.gamma.chances import Chances
from sampling.gamma.costs import Costs
from sampling.types import Budget, NodeCosts

GAMMA_MAX = 16
COOLDOWN = 2  # rounds that keep a gamma after a change to it
LOOK = 1  # gamma while c and v are unknown, and of a probe
RATE = 1.5  # tokens a plain pass' time, before any came
GROWTH = 3  # how much further than the widest pass measured a draft may reach
PROBE_EVERY, PROBE_SELDOM = 8, 64  # plain rounds between probes: doubled by each that fails
ALLOWANCE, SLACK = 3.0, 0.015  # passes that may be lost on plain decoding: 3 and 1.5% of the tokens
APART = 1.25  # what drafts must bring a batch at least: rows drift apart, and the last ones run alone
CREDIT = 8.0  # passes that may be lost after drafts which paid, at most
AT_REST = 16  # of so many plain rounds one is learned from, once plain passes are known and drafts do not pay
REFERENCE = (0, 0, 32, 64, 128)  # rounds until the next plain pass, by how many were timed: T(1) must be known


def goodput(alphas: Sequence[float], c: float, v: Sequence[float], given: Sequence[float] | None = None) -> list[float]:
    """Tokens per plain pass for γ = 0 … len(alphas); `v[n-1]` is v(n), up to n = len(alphas) + 1.

    `given[j]` is the chance that draft j+1 comes when it is asked for (1 by default): silence costs no width.
    """
    tokens = expected_tokens(alphas)
    found = [tokens[0] / v[0]]
    drafting, verifying = 0.0, v[0]
    widths = [1.0, *(given or [1.0] * len(alphas))]
    for gamma in range(1, len(alphas) + 1):
        drafting += c * (widths[gamma] if gamma > 1 else 1.0)  # asking costs as much as one draft, answered or not
        verifying += widths[gamma] * (v[gamma] - v[gamma - 1])
        found.append(tokens[gamma] / (drafting + verifying))
    return found


def best(values: Sequence[float]) -> int:
    """Where the largest value is; the first of equal ones."""
    return max(range(len(values)), key=lambda place: (values[place], -place))


@dataclass
class _Account:
    """Passes of the target that may still be lost to drafting: what plain decoding would have cost, and the margin,
    less what the rounds did. It goes on from answer to answer, so that not each need find out whether drafts pay.
    """

    left: float = ALLOWANCE

    def add(self, tokens: float, cost: float, stake: float = 1.0) -> None:
        """A round that brought `tokens` (mean over rows) for so many passes' time. `stake`: what a draft risks."""
        self.left = min(self.left + (1 + SLACK) * tokens - cost, CREDIT * stake)


class GoodputController:
    """A :class:`sampling.types.GammaController`. One object a drafter; `begin()` opens an answer.

    *First rounds*: two plain passes (T(1)), two looks at gamma 1 (c, v(2)), then gamma up to three
    times what was measured. Seeded `costs` save them. *Later*: the best gamma, kept for at least two
    more rounds after a change. *Where drafting does not pay*: gamma 0 and a probe of gamma 1 after 8, 16, 32,
    64 … plain rounds, of a batch that many a row; of one row a probe that paid is followed by another. *A new answer*
    begins with what costs and chances were in those before. *Whatever comes*: no draft is begun whose loss, should all
    of it be refused, would bring the cost of all answers above 1.015 × plain decoding + 3 passes; what drafts gained
    before counts for up to 8.
    A batch has one gamma for all rows: its passes cost what the longest draft costs, and what drafts bring is judged by
    the row that is behind, as the others wait for it in the end. c and v are learned apart for each number of rows: a
    batch that has lost some is another batch.

    `whole`: for a drafter whose drafts are not cut, such as a cascade: gamma is this or 0, looks and probes too. As
    such a draft may cost more than all that may be lost, one is allowed while nothing is (two before costs are known).
    `chances`: those that the drafter itself learns with.
    """

    def __init__(
        self,
        gamma_max: int = GAMMA_MAX,
        costs: Costs | None = None,
        whole: int | None = None,
        chances: Chances | None = None,
    ) -> None:
        gamma_max = gamma_max if whole is None else whole
        if gamma_max < 1:
            raise ValueError(f"gamma_max must be at least 1, got {gamma_max}")
        self.gamma_max, self.whole = gamma_max, whole is not None
        # What rounds cost is the machine's, not the text's: it may outlive the controller.
        self.costs = self._learned = Costs() if costs is None else costs
        self.chances = Chances() if chances is None else chances
        self.acceptance = Acceptance(gamma_max, self.chances)
        self._rate = self.chances.of("rate", RATE)
        self._calls = self.chances.of("called", 1.0)  # of the drafting rounds those in which the drafter runs a model
        self._account, self._stake = _Account(), 1.0
        self.last: int | None = None  # gamma of the last round
        self.chosen = 0  # gamma of the last round that was neither a probe nor a plain pass for timing
        self.rounds = self.probes = 0
        self._since = COOLDOWN  # rounds since `chosen` changed
        self._news = True  # something was learned of drafts since it was last thought about
        self._idle = 0  # rounds since the drafter was last asked
        self._asleep = 0  # rounds since its model last ran (since it was asked, if it has none)
        self._unreferenced = 0  # rounds since a plain pass was timed
        self._patience = PROBE_EVERY
        self._again = False  # the last probe paid
        self._called = False  # whether it ever ran one
        self._resting = 0  # further plain rounds that are not learned from
        self._grown: dict[int, int] = {}  # tokens of each row of a batch in this answer

    def begin(self) -> None:
        """A new answer: another text. What passes cost and may still be lost stays; chances become a first guess."""
        self.acceptance.catch_up()
        self.chances.begin()
        self.acceptance.begin()
        self._since, self._again, self._news, self._resting = COOLDOWN, False, True, 0
        self._grown.clear()

    # -- choosing -----------------------------------------------------------------------------

    def budget(self, rows: list[int]) -> Budget:
        """The gamma of the coming round, the same for all rows."""
        if (costs := self._learned.of(len(rows))) is not self.costs:
            self.costs, self._news, self._resting = costs, True, 0
        if self._resting:
            return Budget([0] * len(rows))
        gamma = self.last = self._affordable(self._next(len(rows)))
        if not gamma:
            return Budget([0] * len(rows))
        known = self.costs.drafting_known
        price = self._priced(gamma) * self.costs.asking * self._rate.value if known and self._called else None
        return Budget([gamma] * len(rows), costs=self._node_costs(gamma) if known else None, price=price)

    def _node_costs(self, gamma: int) -> NodeCosts | None:
        """What a node must bring, of a tree whose nodes are judged one by one."""
        return None

    def _next(self, rows: int) -> int:
        if self._unreferenced >= REFERENCE[min(self.costs.references, len(REFERENCE) - 1)] and self._needs_reference:
            return 0
        if not self.costs.drafting_known:
            return self._least
        if self._news and self._since >= COOLDOWN:
            found, self._news = self._best(rows), False
            if found != self.chosen:
                self.chosen, self._since = found, -1
        self._since += 1
        if self.chosen == 0 and (self._again or self._idle >= self._patient(rows)):
            return self._least
        return self.chosen

    def _patient(self, rows: int) -> int:
        """Plain rounds before a probe, which is one of every row."""
        return rows * self._patience

    def _best(self, rows: int) -> int:
        rates = self.rates
        if rows > 1:
            rates[0] *= APART
        if self.whole:
            return self.gamma_max if rates[-1] > rates[0] else 0
        return best(rates)

    @property
    def _least(self) -> int:
        """Gamma of a look and of a probe."""
        return self.gamma_max if self.whole else LOOK

    @property
    def _needs_reference(self) -> bool:
        """Whether a plain pass would teach anything: rounds with gamma 0 time themselves."""
        return self.costs.references > 0 or self.costs.reach == 1 or self.costs.borrowed

    @property
    def reach(self) -> int:
        """The largest gamma that may be taken now: little is known of much wider passes than those measured."""
        return self.gamma_max if self.whole else min(self.gamma_max, max(LOOK, GROWTH * (self.costs.reach - 1)))

    @property
    def rates(self) -> list[float]:
        """Expected tokens per plain pass for each gamma that may be taken now, from 0."""
        return self.expected(self.reach)

    def expected(self, limit: int) -> list[float]:
        """Expected tokens per plain pass for gamma 0 … `limit`, however little is known of the wider passes."""
        acceptance = self.acceptance
        c = self.draft_cost
        return goodput(acceptance.alphas[:limit], c, self.costs.v(limit + 1), acceptance.given[:limit])

    @property
    def draft_cost(self) -> float:
        """c of a drafted token, the rounds included in which the drafter runs no model."""
        return (self._calls.value if self._called else 1.0) * self.costs.c

    def _affordable(self, wanted: int) -> int:
        """The largest gamma up to `wanted` whose loss, should all of it be rejected, can be borne."""
        if wanted == 0:
            return 0
        left, v = self._account.left + SLACK, self.costs.v(wanted + 1)
        price = self.costs.waking if self._asleep > 1 else self.costs.c
        if self.whole:
            loss = wanted * price + v[wanted] - 1
            self._stake = max(1.0, loss)
            return wanted if min(loss, ALLOWANCE) <= left else 0
        return next((g for g in range(wanted, 0, -1) if self._priced(g) * price + v[g] - 1 <= left), 0)

    # -- learning -----------------------------------------------------------------------------

    def observe(self, steps: list[Step], predicted: float = 0.0) -> None:
        """A round is over, a Step a row: learn from it."""
        if self._resting:
            self._resting, self.rounds = self._resting - 1, self.rounds + 1
            return
        asked = given = longest = 0
        draft_s = verify_s = sample_s = 0.0
        called = False
        for step in steps:
            asked, given = max(asked, step.gamma), max(given, len(step.drafted))
            longest = max(longest, self._paid_for(step))
            draft_s, verify_s, sample_s = draft_s + step.draft_s, verify_s + step.verify_s, sample_s + step.sample_s
            called = called or len(step.calls) > 1  # the target's own call is always there
        slowest = self._slowest(steps)
        tokens = len(slowest.path) + (slowest.token is not None)
        paid = self._paid(max(1, longest), called) if asked else 0
        idle = self._asleep if self.costs.drafting_known else self._idle  # one that seldom runs its model is timed too
        self.costs.add(given + 1, paid, idle, draft_s, verify_s, called, sample_s)
        plain, v = self.costs.plain or verify_s or 1.0, self.costs.v(given + 1)[given]
        self._rate.learn(tokens, v + (draft_s + sample_s) / plain)
        cost = paid * (self.costs.waking if self._asleep > 1 else self.costs.c) + v
        self._asleep = 0 if (called if self._called else asked) else self._asleep + 1
        if asked and not paid:  # without its model a drafter still takes the time to look things up
            cost += min(self.costs.c, (draft_s + self.costs.judging(sample_s)) / plain)
        self._account.add(tokens, cost, self._stake)
        self.rounds += 1
        self._unreferenced = 0 if given == 0 else self._unreferenced + 1
        if asked == 0:
            self._idle += 1
            self._rest(len(steps))
            return
        self.acceptance.learn(slowest, asked, max(step.length for step in steps))
        if self.chosen == 0 and self.costs.drafting_known:
            self.probes += 1
            paid_off = len(slowest.path) > 0 and tokens > paid * self.costs.c + v  # once awake
            before, self._again = self._again, paid_off and len(steps) == 1  # what a batch gains its rows lose drifting
            self._patience = PROBE_EVERY if before and self._again else min(2 * self._patience, PROBE_SELDOM)
        self._idle, self._news = 0, True

    def _rest(self, rows: int) -> None:
        """A plain round is over: where drafts do not pay most of those behind it would tell nothing new."""
        if self.chosen or self.whole or not self.costs.drafting_known or self.costs.references < len(REFERENCE):
            return
        count = max(0, min(AT_REST - 1, self._patient(rows) - self._idle))
        self._resting = count
        self._account.add(count, count, self._stake)
        self._asleep, self._idle, self._since = self._asleep + count, self._idle + count, self._since + count

    def _slowest(self, steps: list[Step]) -> Step:
        """Of the rows of a batch the one that was behind, which the others will wait for in the end."""
        if len(steps) == 1:
            return steps[0]
        found = min(steps, key=lambda step: self._grown.get(step.row, 0))
        for step in steps:
            self._grown[step.row] = self._grown.get(step.row, 0) + len(step.path) + (step.token is not None)
        return found

    def _paid_for(self, step: Step) -> int:
        """Drafted tokens of a round that cost c."""
        return self._priced(len(step.drafted))

    def _priced(self, drafted: int) -> int:
        """Of so many drafted tokens those that cost c."""
        return drafted

    def _paid(self, drafted: int, called: bool) -> int:
        """Of so many drafted tokens those that cost c: none where a drafter with a model has not run it."""
        self._called = self._called or called
        if not self._called:
            return drafted
        self._calls.learn(float(called))
        return drafted if called else 0

    # -- what others see ----------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """The state, JSON-able: gamma of the last round (None before the first), alphas, c, v(1) … v(gamma_max + 1)."""
        return {
            "gamma": self.last,
            "chosen": self.chosen,
            "alpha": [round(alpha, 3) for alpha in self.acceptance.alphas],
            "c": round(self.costs.c, 4),
            "v": [round(value, 3) for value in self.costs.v(self.gamma_max + 1)],
            "rounds": self.rounds,
            "probes": self.probes,
            "measured": self.costs.drafting_known,
        }
