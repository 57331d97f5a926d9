"""Proofs on any device: drafts change no text, samples have the target's distribution, caches hold what fresh ones do.

The targets are random Llama models made from a seed, so small that thousands of passes take seconds; heads and drafts
with a known share of right ones are made for them. What rounding may do is measured on the target at hand and bounded
by what app/lanes/comparison.py knows of its number format. Knows no pairs, no text and no screen.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from app.lanes.comparison import ROUNDING, difference
from app.lanes.drafters import moved
from sampling.drafters.draft_heads.checkpoint import target_rotary
from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.eagle import FeatureDrafter, FeatureLM
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.tables.tree import TableTreeDrafter
from sampling.events import Finished, Step
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, Drafter, FixedPace, Limits, Rows, Rule, Sampler, Session, Verdict
from utils.logits_processors import make_processor

GAMMA = 4
SHARE = 0.7  # of planted drafts that are right
WIDTHS = (3, 5, 9)  # of the passes that are compared with passes over one token
SAFETY = 4.0  # times what was measured of rounding is put down to it
UNLIKELY = 1e-6  # counts less likely than this are no chance
AUDITED = 4  # rounds from one look at the cache to the next
COUNTED = 3  # tokens of an answer that are counted together
LIVELY = 1.5  # spread of random weights: every part of the model matters then

Found = tuple[str, dict[str, Any]]  # what a check has to say, and its figures
Make = Callable[[list[int]], Drafter]  # from plain decoding's prompt and answer
Checks = Iterator[tuple[str, Callable[[], Found]]]


class WrongError(Exception):
    """What was to hold does not; the text says what was found instead."""


@dataclass(frozen=True)
class Amount:
    """How much is done: texts and tokens of each, answers that are counted."""

    texts: int = 6
    length: int = 48
    samples: int = 6000


# -- random models ----------------------------------------------------------------------------------


def enliven(module: nn.Module, seed: int) -> None:
    """Gaussian weights, a matrix's scaled to its width; norms around 1. The global generator is left alone."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=noise)
            scaled = 1 + 0.3 * drawn if parameter.dim() == 1 else LIVELY * drawn / parameter.shape[-1] ** 0.5
            parameter.copy_(scaled)


def make_target(vocab: int = 40, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random Llama model on the CPU; `changes` are those of its configuration."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(LlamaConfig(**(sizes | changes)))
    enliven(model, seed)
    return model.eval().to(dtype).requires_grad_(False)


def make_student(
    kind: str,
    target: Any,
    short: Sequence[int] | None = None,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> DraftHead:
    """A random draft head for `target`; `short` are the ids of its output layer."""
    large = target.config
    sizes: dict[str, Any] = {
        "kind": kind,
        "vocab_size": large.vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "large_hidden_size": large.hidden_size,
        "large_num_attention_heads": large.num_attention_heads,
        "large_head_dim": large.head_dim,
        "max_position_embeddings": 256,
        "short_list": len(short or ()),
    }
    if kind == "eagle":
        sizes |= {"reads": (0, 1, 2), "wide": True}
    ids = None if short is None else torch.tensor(short)
    with torch.random.fork_rng(devices=[]):
        student = DraftHead(DraftHeadConfig(**(sizes | changes)), ids)
    enliven(student, seed)
    student.adopt(ids, target_rotary(target))
    return student.to(dtype).eval().requires_grad_(False)


def make_drafter(student: DraftHead, target_layers: int = 3) -> ModelDrafter:
    """The drafter of a draft head, whatever its kind."""
    if student.config.kind == "glide":
        return ModelDrafter(GlideLM(student, target_layers))
    if student.config.kind in FeatureLM.kinds:
        return FeatureDrafter(student, student.config.kind)
    return ModelDrafter(CausalLM(StudentNetwork(student), "plain"))


def placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model's parameters on `device` in `dtype`; what turns with the position stays as it is."""
    model = model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def noisy(model: Any, noise: float) -> Any:
    """A copy with Gaussian noise of `noise` × each matrix's own spread: it agrees often, not always."""
    with torch.random.fork_rng(devices=[]):
        twin: Any = LlamaForCausalLM(model.config)
    twin.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    for weight in twin.parameters():
        if weight.dim() == 2:
            weight.data += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return twin.eval().requires_grad_(False)


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
        script = enumerate(self.script[start : start + budget.depth[0]], start)
        said = [(token + (random.Random(at).random() >= self.share)) % self.vocab_size for at, token in script]
        if not self.branching:
            return Draft(torch.tensor([said], dtype=torch.long), calls=calls)
        tree = [node for token in said for node in ((token + 2) % self.vocab_size, token)]
        parents = [2 * depth - 1 for depth in range(len(said)) for _ in range(2)]
        return Draft(torch.tensor([tree], dtype=torch.long), parents=torch.tensor(parents), calls=calls)

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        self.inner.observe(rows, draft, verdict)


# -- rounding ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounding:
    """`apart`: how far the logits of one token lie apart in passes of different width. `most`: what is put down to
    rounding, of logits and of the gap under which two tokens may change places."""

    apart: float
    most: float


def off(one: Tensor, other: Tensor) -> float:
    """The largest difference of two logits; infinite where one is no number."""
    return float((one - other).float().abs().nan_to_num(nan=math.inf).max())


def rounding_of(lm: CausalLM, precision: str, prompt: Sequence[int], length: int) -> Rounding:
    """Measured over a greedy answer, drafted by itself so that nothing is refused; bounded by the number format's own.

    WrongError where passes lie further apart than that.
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
            wide = session.score([row[:begun]], Draft(torch.tensor([drafted], dtype=torch.long)))[0].float()
            session.commit(torch.arange(len(drafted))[None])
            pairs = zip(alone[begun - len(prompt) :], wide, strict=False)
            worst = max(worst, *(off(one, other) for one, other in pairs))
            begun += len(drafted) + 1
    if not worst <= moved_most:
        raise WrongError(
            f"logits of passes of different width lie {worst:.2g} apart, {precision} allows {moved_most:g}"
        )
    return Rounding(worst, min(tie, SAFETY * worst))


# -- what is proved ---------------------------------------------------------------------------------


def run(
    lm: CausalLM, prompts: Rows, drafter: Drafter, sampler: Sampler, length: int, **more: Any
) -> Iterator[Step | Finished]:
    """The loop's Steps and ends."""
    gamma = FixedPace(more.pop("gamma", GAMMA))
    events = generate(lm, prompts, drafter, sampler, Limits(length), pace=gamma, **more)
    return (event for event in events if isinstance(event, Step | Finished))


def check_both(steps: Sequence[Step]) -> str:
    """How drafts fared, in words; WrongError where all shared one fate: that proves nothing."""
    accepted = sum(len(step.path) for step in steps)
    refused = sum(any(parent == (step.path or (-1,))[-1] for parent in step.parents) for step in steps)
    if not accepted or not refused:
        raise WrongError(f"nothing is proved: {accepted} drafts were accepted, {refused} rounds refused one")
    return f"{accepted:,} drafts accepted, {refused:,} rounds refused one"


def identical(
    lm: CausalLM,
    make: Make,
    samplers: Mapping[str, KeyedSampler],
    prompts: Rows,
    length: int,
    rounding: Rounding,
) -> Found:
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
            if at >= min(len(plain), len(said)):
                raise WrongError(f"{mode}: the text ends after {len(said)} tokens, plain decoding's after {len(plain)}")
            gap = abs(gap_of(lm, [*prompt, *plain[:at]], plain[at], said[at], sampler))
            if not gap <= rounding.most:
                raise WrongError(
                    f"{mode}: the text leaves plain decoding's at token {at + 1}, for one {gap:.2g} away from it "
                    f"(rounding explains {rounding.most:.1g})"
                )
            tied += 1
    count = len(samplers) * len(prompts)
    parts = "all the same" if not tied else f"{tied} of them part at a tie within rounding"
    return f"{count} texts of {length} tokens, {parts}; {check_both(steps)}", {"texts": count, "tied": tied}


def emitted(event: Step | Finished) -> Sequence[int]:
    return event.emitted if isinstance(event, Step) else ()


def gap_of(lm: CausalLM, row: list[int], one: int, other: int, sampler: KeyedSampler) -> float:
    """How far `other` lies below `one` behind `row`, in logits and the noise that they are drawn with."""
    logits = lm.open([row]).score([row], Draft.empty(1))[0, 0].float()
    noise = sampler.shared_noise(0, len(row), [one, other])
    return float(logits[one] - logits[other]) + noise[0] - noise[1]


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


def chi_square_p(counts: Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """How likely counts at least as far from `expected` are; cells that expect fewer than 5 are one."""
    total, cells, rest = sum(counts.values()), list[tuple[float, float]](), (0.0, 0.0)
    for key, p in expected.items():
        seen, wanted = counts.get(key, 0), p * total
        if wanted < 5:
            rest = rest[0] + seen, rest[1] + wanted
        else:
            cells.append((seen, wanted))
    if sum(seen for seen, _ in cells) + rest[0] < total:
        return 0.0  # something was said that the distribution leaves no chance
    cells += [rest] if rest[1] > 0 else []
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    shape = torch.tensor([max(1, len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape[0], shape[1]))


def counted(lm: CausalLM, drafter: Drafter, prompt: list[int], samples: int, batch: int = 500) -> Found:
    """The first tokens of many sampled answers have the target's distribution."""
    processor, counts, steps = make_processor(1.0), Counter[tuple[int, ...]](), list[Step]()
    for seed in range(-(-samples // batch)):
        rows: Rows = [[] for _ in range(batch)]
        for event in run(lm, [prompt] * batch, drafter, KeyedSampler(processor, 1000 + seed), COUNTED + 1, gamma=3):
            rows[event.row] += emitted(event)
            steps += [event] if isinstance(event, Step) else []
        counts.update(tuple(row[:COUNTED]) for row in rows)
    p = chi_square_p(counts, distribution_of(lm, prompt, processor))
    told = f"{counts.total():,} answers, chi-square p = {p:.2g}"
    if not p > UNLIKELY:
        raise WrongError(f"sampled text has not the target's distribution: {told}")
    return f"{told}; {check_both(steps)}", {"answers": counts.total(), "p": p}


def audited(lm: CausalLM, makers: Iterable[Make], prompt: list[int], length: int, rounding: Rounding) -> Found:
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
                if not worst <= rounding.most:
                    raise WrongError(
                        f"after {len(steps)} rounds logits are {worst:.2g} off those of a fresh cache "
                        f"(rounding explains {rounding.most:.1g})"
                    )
    return f"{len(steps)} rounds, logits within {worst:.1g} of a fresh cache's; {check_both(steps)}", {"off": worst}


def core(device: torch.device, dtype: torch.dtype, amount: Amount) -> Checks:
    """Everything above with random models in one number format."""
    precision = str(dtype).removeprefix("torch.")
    dense, small = make_target(), make_target(6, seed=3)
    head = moved(make_student("feature", dense), device, dtype, dense)
    drafting = [CausalLM(placed(noisy(model, 0.1), device, dtype), "drafter") for model in (dense, small)]
    target, few = (CausalLM(placed(model, device, dtype)) for model in (dense, small))
    ids = target.vocab_size
    yield from proved(
        precision,
        (target, few),
        {
            "model chain": lambda script: ModelDrafter(drafting[0]),
            "table tree": lambda script: TableTreeDrafter(recall=True, shared_noise=True),
            "branching tree": lambda script: PlantedDrafter(NoDrafter(), script, SHARE, ids, branching=True),
            "feature head": lambda script: PlantedDrafter(make_drafter(head), script, SHARE, ids),
        },
        {
            "token by token": ModelDrafter(drafting[1]),
            "block": ModelDrafter(drafting[1], rule=Rule.BLOCK),
        },
        amount,
    )


def proved(
    precision: str,
    targets: tuple[CausalLM, CausalLM],
    makers: Mapping[str, Make],
    counting: Mapping[str, Drafter],
    amount: Amount,
    rounded: CausalLM | None = None,
) -> Checks:
    """The checks of one number format; `targets`: one for texts, one of few ids for counting.

    `rounded`: where the format's rounding is not known, the target in bfloat16, whose rounding is allowed too.
    """
    (target, few), chance = targets, random.Random(7)
    prompts = [[chance.randrange(target.vocab_size) for _ in range(9)] for _ in range(amount.texts)]
    roundings: list[Rounding] = []

    def widths() -> Found:
        named = [(target, "bfloat16"), (rounded, "bfloat16")] if rounded is not None else [(target, precision)]
        each = [rounding_of(lm, name, prompts[0], 2 * amount.length) for lm, name in named]
        roundings.append(max(each, key=lambda one: one.most))
        most = roundings[0].most
        told = f"logits within {each[0].apart:.1g}, so {most:.1g} is put down to rounding"
        return told, {"apart": each[0].apart, "most": most}

    def rounding() -> Rounding:
        if not roundings:
            raise WrongError("what rounding may do could not be measured")
        return roundings[0]

    samplers = {
        "greedy": KeyedSampler(make_processor(0.0)),
        "gumbel": KeyedSampler(make_processor(0.7), 1, coupling="gumbel"),
    }

    def identity(make: Make) -> Found:
        return identical(target, make, samplers, prompts, amount.length, rounding())

    def audit() -> Found:
        return audited(target, makers.values(), prompts[0], 2 * amount.length, rounding())

    yield f"{precision}: passes of different width", widths
    for name, make in makers.items():
        yield f"{precision}: identity, {name}", partial(identity, make)
    for name, drafter in counting.items():
        yield f"{precision}: counting, {name}", partial(counted, few, drafter, [3, 1, 3, 1, 3], amount.samples)
    yield f"{precision}: cache audit", audit


def surviving(name: str, checks: Checks) -> Checks:
    """The checks; what goes wrong while they are prepared is one of them, so that others go on."""
    try:
        yield from checks
    except Exception as error:
        wrong = error

        def tell() -> Found:
            raise wrong

        yield f"{name}: preparing", tell
