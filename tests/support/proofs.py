"""Proofs on any device: drafts change no text, samples have the target's distribution, caches hold what fresh ones do.

The targets are random Llama models, so small that thousands of passes take seconds; heads and drafts with a known share
of right ones are made for them. What rounding may do is measured on the target at hand and bounded by what
app/lanes/answers.py knows of its number format. Each proof returns its figures in words or fails with what it saw.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from app.lanes.answers import ROUNDING, difference
from app.lanes.drafters import moved
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.events import Finished, Step
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, Drafter, DraftTree, FixedPace, Limits, Rows, Rule, Sampler, Session, Verdict
from tests.support.reference import chi_square_p
from tests.support.students import make_drafter, make_student, make_target
from tests.support.tiny import noisy_copy
from utils.logits_processors import make_processor

GAMMA = 4
SHARE = 0.7  # of planted drafts that are right
WIDTHS = (3, 5, 9)  # of the passes that are compared with passes over one token
SAFETY = 4.0  # times what was measured of rounding is put down to it
UNLIKELY = 1e-6  # counts less likely than this are no chance
AUDITED = 4  # rounds from one look at the cache to the next
COUNTED = 3  # tokens of an answer that are counted together

Make = Callable[[list[int]], Drafter]  # from plain decoding's prompt and answer


@dataclass(frozen=True)
class Amount:
    """How much is done: texts and tokens of each, answers that are counted."""

    texts: int = 6
    length: int = 48
    samples: int = 6000


def placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model's parameters on `device` in `dtype`; what turns with the position stays as it is."""
    model = model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class PlantedDrafter(Drafter):
    """Drafts of known fate for one row, in the place of another drafter's, whose passes are run: at a `share` of all
    positions they say what `script` (prompt and answer) says there, at the others not.

    `branching`: before each stands a sibling that is wrong, so that accepted nodes never lie side by side.
    """

    def __init__(
        self, inner: Drafter, script: Sequence[int], share: float, vocab_size: int, *, branching: bool = False
    ) -> None:
        self.inner, self.script, self.share, self.vocab_size = inner, script, share, vocab_size
        self.branching = branching
        self.traits = replace(inner.traits, rule=Rule.POINT, tree=None)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return self.inner.sessions

    def start(self, prompt: Rows, target: Session, verifier: Session) -> None:
        self.inner.start(prompt, target, verifier)

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        calls, start = self.inner.propose(rows, budget, sampler).calls, len(rows[0])
        script = enumerate(self.script[start : start + budget.max_depth[0]], start)
        said = [(token + (random.Random(at).random() >= self.share)) % self.vocab_size for at, token in script]
        if not self.branching:
            return Draft([DraftTree.of(said)], calls=calls)
        tree = [node for token in said for node in ((token + 2) % self.vocab_size, token)]
        parents = [2 * depth - 1 for depth in range(len(said)) for _ in range(2)]
        return Draft([DraftTree.of(tree, parents)], calls=calls)

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        self.inner.observe(rows, draft, verdict)


class ScriptedNetwork:
    """A network whose passes are real and whose logits name one token: what `script` [N] says at the next position."""

    def __init__(self, network: Any, script: list[int]) -> None:
        self._network, self._script = network, torch.tensor(script, device=network.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def forward(self, ids: Any, positions: Any, mask: Any, cache: Any, keep: int, hidden: Any = False) -> Any:
        """See :class:`sampling.types.Network`."""
        logits, states = self._network.forward(ids, positions, mask, cache, keep, hidden)
        following = self._script[positions[:, -keep:] + 1]
        return logits.scatter(-1, following[..., None], torch.finfo(logits.dtype).max / 2), states


# -- rounding ---------------------------------------------------------------------------------------


def off(one: Tensor, other: Tensor) -> float:
    """The largest difference of two logits; infinite where one is no number."""
    return float((one - other).float().abs().nan_to_num(nan=math.inf).max())


def rounding_of(lm: CausalLM, precision: str, prompt: Sequence[int], length: int) -> float:
    """The difference of logits, and the gap of two of them, that is put down to rounding.

    Measured over a greedy answer, drafted by itself so that nothing is refused; bounded by the number format's own.
    """
    moved_most, tie = ROUNDING[precision]
    row, alone, session = [*prompt], [], lm.open([[*prompt]])
    for _ in range(length):
        alone.append(session.score([row], Draft.empty(1))[0, 0].float())
        row = [*row, int(alone[-1].argmax())]
    worst = 0.0
    for width in (*WIDTHS, length):
        session, begun = lm.open([[*prompt]]), len(prompt)
        while begun < len(row):
            drafted = row[begun : begun + width - 1]
            wide = session.score([row[:begun]], Draft.of([drafted]))[0].float()
            session.commit([list(range(len(drafted)))])
            pairs = zip(alone[begun - len(prompt) :], wide, strict=False)
            worst = max(worst, *(off(one, other) for one, other in pairs))
            begun += len(drafted) + 1
    assert worst <= moved_most, (
        f"logits of passes of different width lie {worst:.2g} apart, {precision} allows {moved_most:g}"
    )
    return min(tie, SAFETY * worst)


# -- what is proved ---------------------------------------------------------------------------------


def run(
    lm: CausalLM, prompts: Rows, drafter: Drafter, sampler: Sampler, length: int, **more: Any
) -> Iterator[Step | Finished]:
    """The loop's Steps and ends."""
    gamma = FixedPace(more.pop("gamma", GAMMA))
    events = generate(lm, prompts, drafter, sampler, Limits(length), pace=gamma, **more)
    return (event for event in events if isinstance(event, Step | Finished))


def check_both(steps: Sequence[Step]) -> str:
    """How drafts fared, in words; fails where all shared one fate: that proves nothing."""
    accepted = sum(len(step.path) for step in steps)
    refused = sum(any(parent == (step.path or (-1,))[-1] for parent in step.parents) for step in steps)
    assert min(accepted, refused), f"nothing is proved: {accepted} drafts were accepted, {refused} rounds refused one"
    return f"{accepted:,} drafts accepted, {refused:,} rounds refused one"


def identical(
    lm: CausalLM,
    make: Make,
    samplers: Mapping[str, KeyedSampler],
    prompts: Rows,
    length: int,
    rounding: float,
) -> str:
    """Texts with drafts are plain decoding's, or part where rounding may turn the target's choice."""
    steps: list[Step] = []
    tied = 0
    for mode, sampler in samplers.items():
        for prompt in prompts:
            plain = [token for step in run(lm, [prompt], NoDrafter(), sampler, length) for token in emitted(step)]
            events = [*run(lm, [prompt], make([*prompt, *plain]), sampler, length)]
            steps += [event for event in events if isinstance(event, Step)]
            said = [token for event in events for token in emitted(event)]
            if (at := difference(plain, said)) is None:
                continue
            both = len(plain), len(said)
            assert at < min(both), f"{mode}: the text ends after {both[1]} tokens, plain decoding's after {both[0]}"
            gap = abs(gap_of(lm, [*prompt, *plain[:at]], plain[at], said[at], sampler))
            assert gap <= rounding, (
                f"{mode}: the text leaves plain decoding's at token {at + 1}, for one {gap:.2g} away from it "
                f"(rounding explains {rounding:.1g})"
            )
            tied += 1
    count = len(samplers) * len(prompts)
    parts = "all the same" if not tied else f"{tied} of them part at a tie within rounding"
    return f"{count} texts of {length} tokens, {parts}; {check_both(steps)}"


def emitted(event: Step | Finished) -> Sequence[int]:
    return event.emitted if isinstance(event, Step) else ()


def gap_of(lm: CausalLM, row: list[int], one: int, other: int, sampler: KeyedSampler) -> float:
    """How far `other` lies below `one` behind `row`, in logits and the noise that they are drawn with."""
    logits = lm.open([row]).score([row], Draft.empty(1))[0, 0].float()
    noise = sampler.noise(0, len(row), [one, other])
    return float(logits[one] - logits[other]) + sampler.processor.temperature * (noise[0] - noise[1])


def distribution_of(lm: CausalLM, prompt: list[int], processor: Any) -> dict[tuple[int, ...], float]:
    """The target's exact distribution of the first tokens, by its own passes over all that may be said."""
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(COUNTED):
        rows = [[*prompt, *said] for said in expected]
        probs = processor(lm.open(rows).score(rows, Draft.empty(len(rows)))[:, 0]).tolist()
        expected = {
            (*said, token): mass * p
            for (said, mass), row in zip(expected.items(), probs, strict=True)
            for token, p in enumerate(row)
        }
    return expected


def counted(lm: CausalLM, drafter: Drafter, prompt: list[int], samples: int, batch: int = 500) -> str:
    """The first tokens of many sampled answers have the target's distribution."""
    processor, counts, steps = make_processor(1.0), Counter[tuple[int, ...]](), list[Step]()
    for seed in range(-(-samples // batch)):
        rows: Rows = [[] for _ in range(batch)]
        for event in run(lm, [prompt] * batch, drafter, KeyedSampler(processor, 1000 + seed), COUNTED + 1, gamma=3):
            rows[event.row] += emitted(event)
            steps += [event] if isinstance(event, Step) else []
        counts.update(tuple(row[:COUNTED]) for row in rows)
    p = chi_square_p(dict(counts), distribution_of(lm, prompt, processor))
    told = f"{counts.total():,} answers, chi-square p = {p:.2g}"
    assert p > UNLIKELY, f"sampled text has not the target's distribution: {told}"
    return f"{told}; {check_both(steps)}"


def audited(lm: CausalLM, makers: Iterable[Make], prompt: list[int], length: int, rounding: float) -> str:
    """A session's logits are those of one that has just read the same tokens, after many rounds that refused drafts."""
    worst, steps, sampler = 0.0, list[Step](), KeyedSampler(make_processor(0.9), 3)
    plain = [token for step in run(lm, [prompt], NoDrafter(), sampler, length) for token in emitted(step)]
    for make in makers:
        drafter = make([*prompt, *plain])
        row, session = [*prompt], lm.open([prompt], hidden=drafter.traits.needs_hidden)
        for turn, event in enumerate(run(lm, [prompt], drafter, sampler, length, session=session)):
            row += emitted(event)
            steps += [event] if isinstance(event, Step) else []
            if turn % AUDITED == 0 or isinstance(event, Finished):
                both = [one.score([row], Draft.empty(1)) for one in (session.fork(), lm.open([row]))]
                worst = max(worst, off(*both))
                assert worst <= rounding, (
                    f"after {len(steps)} rounds logits are {worst:.2g} off those of a fresh cache "
                    f"(rounding explains {rounding:.1g})"
                )
    return f"{len(steps)} rounds, logits within {worst:.1g} of a fresh cache's; {check_both(steps)}"


# -- the proofs of one number format ----------------------------------------------------------------

DRAFTERS = ("model chain", "table tree", "branching tree", "feature head")
RULES = ("token by token", "block")
NAMES = (
    "passes of different width",
    *(f"identity, {name}" for name in DRAFTERS),
    *(f"counting, {name}" for name in RULES),
    "cache audit",
)


class Proofs:
    """The proofs over random models on one device in one number format; `run` takes one of NAMES.

    `targets`: one for texts, one of few ids for counting, with a drafter for each; they are made where not given.
    `rounded`: where the format's rounding is not known, the target in bfloat16, whose rounding is allowed too.
    """

    def __init__(
        self,
        device: torch.device,
        precision: str,
        amount: Amount,
        targets: tuple[CausalLM, CausalLM, CausalLM, CausalLM] | None = None,
        rounded: CausalLM | None = None,
    ) -> None:
        self.device, self.precision, self.amount, self.rounded = device, precision, amount, rounded
        self.target, self.few, self.drafter, self.guess = targets or self._made()
        chance = random.Random(7)
        ids = self.target.vocab_size
        self.prompts = [[chance.randrange(ids) for _ in range(9)] for _ in range(amount.texts)]
        self.samplers = {
            "greedy": KeyedSampler(make_processor(0.0)),
            "gumbel": KeyedSampler(make_processor(0.7), 1, coupling="gumbel"),
        }
        self.makers: dict[str, Make] = {"model chain": lambda script: ModelDrafter(self.drafter)}
        if targets is None:
            self.makers |= {
                "table tree": lambda script: LookupDrafter(tree=True, recall=True, shared_noise=True),
                "branching tree": lambda script: PlantedDrafter(NoDrafter(), script, SHARE, ids, branching=True),
                "feature head": lambda script: PlantedDrafter(make_drafter(self.head), script, SHARE, ids),
            }

    def _made(self) -> tuple[CausalLM, CausalLM, CausalLM, CausalLM]:
        dtype = getattr(torch, self.precision)
        dense, small = make_target(), make_target(6, seed=3)
        self.head = moved(make_student("feature", dense), self.device, dtype, dense)
        drafting = [CausalLM(placed(noisy_copy(model, 0.1), self.device, dtype), "drafter") for model in (dense, small)]
        target, few = (CausalLM(placed(model, self.device, dtype)) for model in (dense, small))
        return target, few, *drafting

    @cached_property
    def rounding(self) -> float:
        named = [(self.target, self.precision)]
        if self.rounded is not None:
            named = [(self.target, "bfloat16"), (self.rounded, "bfloat16")]
        return max(rounding_of(lm, name, self.prompts[0], 2 * self.amount.length) for lm, name in named)

    def run(self, name: str) -> str:
        """What a proof found, in words; AssertionError where it fails."""
        proof, _, of = name.partition(", ")
        if proof == "identity":
            return identical(
                self.target, self.makers[of], self.samplers, self.prompts, self.amount.length, self.rounding
            )
        if proof == "counting":
            drafter = ModelDrafter(self.guess, **({"rule": Rule.BLOCK} if of == "block" else {}))
            return counted(self.few, drafter, [3, 1, 3, 1, 3], self.amount.samples)
        if proof == "cache audit":
            return audited(self.target, self.makers.values(), self.prompts[0], 2 * self.amount.length, self.rounding)
        return f"{self.rounding:.1g} is put down to rounding"
