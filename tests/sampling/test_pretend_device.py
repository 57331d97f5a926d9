"""The loop on a pretended device: all drafters draft as on the CPU, nothing mixes devices, the host waits rarely."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sampling
from app.settings.table import Settings
from sampling.constraint import FormConstraint
from sampling.drafters import registry
from sampling.drafters.registry import ROWS, DraftRequest
from sampling.drafters.tables.suffix import SuffixIndex
from sampling.drafters.tables.table_file import StaticTables
from sampling.events import Event, Step
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import EncDecLM
from sampling.types import LM, Drafter, FixedPace, Limits, Rows
from tests.sampling.models.test_encoder_decoder import drafters, t5
from tests.support.pretend_device import moved, pretending
from tests.support.refusals import refused
from tests.support.runs import decode, sampler
from tests.support.students import make_drafter, make_student, make_target
from tests.support.tiny import noisy_copy
from training.tables.build import Passage, arrays_of, count_levels
from utils.catalogue.heads import HEAD_KINDS
from utils.errors import LogitsError

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5]
SEVERAL = [PROMPT, PROMPT[:4], PROMPT[2:]]
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "gumbel": {"temperature": 0.8, "seed": 3, "coupling": "gumbel"},
}


class RandomPair:
    """What a pair has for drafters, of random models; see :class:`sampling.drafters.registry.Parts`.

    `place` puts the target and its heads somewhere, `aside` the drafter model; `short` are the ids of the heads.
    """

    def __init__(
        self,
        place: Callable[[Any], Any],
        aside: Callable[[Any], Any] | None = None,
        short: Sequence[int] | None = None,
    ) -> None:
        self._dense = dense = make_target(dtype=torch.float64)
        self._place, self._short, self._heads = place, short, dict[str, Any]()
        self.model = CausalLM((aside or place)(noisy_copy(dense, 0.1).double()), "drafter")
        self.target = CausalLM(place(make_target(dtype=torch.float64)))

    def tables(self) -> StaticTables:
        return StaticTables({}, [arrays_of(level) for level in count_levels([Passage(PROMPT * 2)], 4)])

    def finished(self, request: DraftRequest) -> SuffixIndex | None:
        return None

    def head(self, kind: str, make: Callable[[Any], Any]) -> Any:
        if kind not in self._heads:
            self._heads[kind] = self._place(make_student(kind, self._dense, self._short, dtype=torch.float64))
        return make_drafter(self._heads[kind]).lm

    def cascade(self, asked: DraftRequest) -> tuple[list[Drafter], list[list[int]], float]:
        members = [self.build(DraftRequest(word, Settings())) for word in ("model", "glide", "maxgram")]
        return members, [[2, 1, 1], [0, 2, 1], [0, 0, 1]], 1.5

    def build(self, asked: DraftRequest) -> Drafter:
        drafter: Any = registry.build(self, asked)
        if asked.word == "oracle":
            drafter.plain = lambda rows, session: decode(self.target, rows, None, sampler(), length=16, session=session)
        return drafter


PAIRS: dict[str, Callable[[], RandomPair]] = {
    "on the CPU": lambda: RandomPair(lambda module: module),
    "on the device": lambda: RandomPair(moved),
    "few ids on the CPU": lambda: RandomPair(lambda module: module, short=range(3, 30)),
    "few ids on the device": lambda: RandomPair(moved, short=range(3, 30)),
    "on two devices": lambda: RandomPair(moved, lambda module: moved(module, "ipu:1")),
    "the drafter on the CPU": lambda: RandomPair(moved, lambda module: module),
}


@functools.cache
def pair_of(name: str) -> RandomPair:
    return PAIRS[name]()


def choices(step: Step) -> tuple[Any, ...]:
    return step.row, step.drafted, step.parents, step.source, step.path, step.token, step.chosen, step.gamma


def figures(step: Step) -> list[float]:
    return [step.top2_gap, *step.target_p, *step.draft_p]


def alike(run: Callable[[Any], list[Event]], on_device: Callable[[], Any], on_cpu: Callable[[], Any]) -> None:
    """`run` tells the same on the device as on the CPU, but for the times."""
    with pretending():
        got = steps(run(on_device()))
    wanted = steps(run(on_cpu()))
    assert [*map(choices, got)] == [*map(choices, wanted)]
    for ours, theirs in zip(got, wanted, strict=True):
        assert figures(ours) == pytest.approx(figures(theirs), abs=1e-5)


def same(
    word: str,
    grown: str,
    kind: str,
    prompt: Rows,
    pair: str = "on the device",
    cpu: str = "on the CPU",
    settings: Settings = Settings(),
    form: bool = False,
    **options: Any,
) -> None:
    """A drafter of the registry drafts on the device as on the CPU; `options` are :func:`decode`'s."""

    def run(pair: RandomPair) -> list[Event]:
        drafter = pair.build(DraftRequest(word, settings, grown))
        how = {**SAMPLERS[kind], "constraint": FormConstraint(Alternating()) if form else None}
        return decode(pair.target, prompt, drafter, sampler(**how), length=8, **options)

    alike(run, lambda: pair_of(pair), lambda: pair_of(cpu))


def steps(events: list[Event]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


TOGETHER = ("tables+model", "tables+feature", "match+eagle", "match+dspark")  # of the pairs, which one function builds
# mtp needs a target that ships a layer: tests/sampling/drafters/draft_heads/test_mtp.py has these.
WORDS = [
    (word, row.expand) for word, row in ROWS.items() if row.needs != "mtp" and ("+" not in word or word in TOGETHER)
]
CHAINS = [(word, "none", "sampled") for word, _ in WORDS]
TREES = [(word, grown, "gumbel" if "tables" in word else "greedy") for word, grown in WORDS if grown != "none"]
GROWN = [(word, "dynamic", "greedy") for word in ("model", *HEAD_KINDS)]


@pytest.mark.parametrize(("word", "grown", "kind"), [*CHAINS, *TREES, *GROWN])
def test_every_drafter_does_on_a_device_what_it_does_on_the_cpu(word: str, grown: str, kind: str) -> None:
    same(word, grown, kind, [PROMPT])


@pytest.mark.parametrize(
    "word", ["model", "glide", "feature", "eagle", "peagle", "dspark", "tables+feature", "cascade"]
)
def test_batches_do_on_a_device_what_they_do_on_the_cpu(word: str) -> None:
    same(word, "none", "sampled", SEVERAL)


@pytest.mark.parametrize("word", ["model", "dflash"])
@pytest.mark.parametrize("prompt", [[PROMPT], SEVERAL])
def test_blocks_are_verified_on_a_device_as_on_the_cpu(word: str, prompt: Rows) -> None:
    same(word, "none", "sampled", prompt, settings=Settings().changed(verify="block"))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_logits_that_are_no_numbers_are_told_on_a_device_too(kind: str) -> None:
    model = make_target()
    model.lm_head.weight[0] = float("nan")
    with pretending(), pytest.raises(LogitsError, match="NaN"):
        decode(CausalLM(moved(model)), [PROMPT], None, sampler(**SAMPLERS[kind]), length=2)


@pytest.mark.parametrize("word", ["model", "feature", "dspark", "cascade"])
def test_heads_of_few_ids_and_noted_alternatives_do_on_a_device_what_they_do_on_the_cpu(word: str) -> None:
    same(word, "none", "sampled", [PROMPT], "few ids on the device", "few ids on the CPU", alternatives=2)


@dataclass(frozen=True)
class Alternating:
    """A form: even and odd ids in turn, and after a multiple of five the next id."""

    last: int = 0

    @property
    def forced(self) -> int | None:
        return self.last + 1 if self.last and self.last % 5 == 0 else None

    @property
    def refused(self) -> torch.Tensor:
        ids = torch.arange(40)
        return ids % 2 == self.last % 2 if self.forced is None else ids != self.forced

    def after(self, token: int) -> "Alternating | None":
        return None if self.refused[token] else Alternating(token)


@pytest.mark.parametrize(
    ("word", "grown", "kind"),
    [
        *[("model", "none", "sampled"), ("glide", "none", "sampled"), ("dspark", "none", "sampled")],
        *[("model", "dynamic", "greedy"), ("feature", "dynamic", "greedy"), ("dflash", "dynamic", "greedy")],
        *[("tables+feature", "joint", "gumbel"), ("ngram", "none", "gumbel"), ("cascade", "none", "sampled")],
    ],
)
def test_forms_do_on_a_device_what_they_do_on_the_cpu(word: str, grown: str, kind: str) -> None:
    same(word, grown, kind, [PROMPT], "few ids on the device", "few ids on the CPU", form=True)
    if (word, grown) == ("model", "none"):
        same(word, grown, kind, [PROMPT, [7, 7], PROMPT[2:]], form=True)


@pytest.mark.parametrize("word", ["none", "model", "tables", "chain"])
@pytest.mark.parametrize("prompt", [[[5, 6, 7, 5, 6, 1]], [[5, 6, 7, 5, 6, 1], [9, 8, 1]]])
def test_encoder_decoder_models_do_on_a_device_what_they_do_on_the_cpu(word: str, prompt: Rows) -> None:
    def pair(place: Callable[[Any], Any]) -> tuple[LM, dict[str, Callable[[], Drafter]]]:
        target = t5()
        return EncDecLM(place(target)), drafters(place(t5(7, like=target, noise=0.05)))

    def run(both: tuple[LM, dict[str, Callable[[], Drafter]]]) -> list[Event]:
        return decode(both[0], prompt, both[1][word](), sampler(0.8, 3), length=8)

    alike(run, lambda: pair(moved), lambda: pair(lambda model: model))


@pytest.mark.parametrize(("word", "grown"), [("model", "none"), ("model", "dynamic"), ("tables+model", "joint")])
@pytest.mark.parametrize("prompt", [[PROMPT], SEVERAL])
def test_a_drafter_model_may_run_on_another_device_than_its_target(word: str, grown: str, prompt: Rows) -> None:
    same(word, grown, "sampled", prompt, "on two devices")
    same(word, grown, "greedy", prompt, "the drafter on the CPU")


def rounds(word: str, kind: str, prompt: Rows, grown: str = "none") -> list[dict[str, int]]:
    """How often the host waited in each round but the first two, by what waited and where."""
    each = list[dict[str, int]]()
    with pretending() as waits:
        pair = pair_of("on the device")
        drafter = pair.build(DraftRequest(word, Settings(), grown))
        for event in generate(pair.target, prompt, drafter, sampler(**SAMPLERS[kind]), Limits(9), pace=FixedPace(4)):
            if isinstance(event, Step) and event.row == 0:
                each.append(dict(waits))
                waits.clear()
    return each[2:]


@pytest.mark.parametrize(
    ("most", "word", "kind", "prompt", "grown"),
    [  # at most so many, of a drafter, a sampler, a prompt and a kind of tree
        # for the pass and for its tokens
        *((2, "none", kind, prompt, "none") for kind in SAMPLERS for prompt in ([PROMPT], SEVERAL)),
        # no oftener where drafts are looked up
        *((2, word, "sampled", [PROMPT], "none") for word in ("tables", "match", "suffix", "static", "maxgram")),
        *((2, word, "sampled", [PROMPT], "dynamic") for word in ("tables", "match", "suffix", "static")),
        # once more for a drafted chain, by heads, blocks and whatever asks the target for more too
        *(
            (3, word, kind, prompt, "none")
            for word in ("model", "glide")
            for kind in SAMPLERS
            for prompt in ([PROMPT], SEVERAL)
        ),
        *((3, word, "greedy", [PROMPT], "none") for word in ("plain", "feature", "eagle", "peagle", "dflash", "ngram")),
        (3, "tables+feature", "greedy", [PROMPT], "none"),
        # at each level, where drafts hang on the drafts before them
        *(
            (6, word, "greedy", [PROMPT], grown)
            for word in ("tables+feature", "tables+model")
            for grown in ("none", "joint")
        ),
        (6, "dflash2", "greedy", [PROMPT], "none"),
        (10, "dspark", "greedy", [PROMPT], "none"),
    ],
)
def test_a_round_waits_no_oftener_than_it_must(most: int, word: str, kind: str, prompt: Rows, grown: str) -> None:
    assert all(sum(waits.values()) <= most for waits in rounds(word, kind, prompt, grown))


def test_no_file_of_sampling_names_a_kind_of_gpu() -> None:
    files = sorted(Path(sampling.__file__).parent.rglob("*.py"))
    assert [
        file.name for file in files if re.search(r"torch\.cuda|['\"]cuda\b", file.read_text(encoding="utf-8"))
    ] == []


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with pretending():
        here, there, host = torch.ones(3, device="ipu:0"), torch.ones(3, device="ipu:1"), torch.ones(3)
        for other in (there, host):
            with pytest.raises(RuntimeError, match=r"add: tensors on .*ipu:0"):
                _ = here + other
        refused(
            here.index_select, 0, torch.tensor([1]), kind=RuntimeError, match="index_select: tensors on cpu and ipu:0"
        )
        refused(here.numpy, kind=TypeError, match="can't convert ipu:0")
        assert (here + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number of the host


def test_the_device_counts_for_what_a_host_waits() -> None:
    with pretending() as waits:
        values = torch.arange(4.0, device="ipu:0")
        values[1:3].mul_(2)
        values[values > 3] = 0.0
        torch.tensor([1, 2]).to("ipu:0", non_blocking=True)
        assert not waits
        for wait in (
            lambda: values.sum().item(),
            lambda: bool((values > 0).any()),
            lambda: int(values.argmax()),
            lambda: values.tolist(),
            lambda: values.cpu(),
            lambda: values.to(torch.zeros(1)),
            lambda: torch.zeros(4).copy_(values),
            lambda: values.nonzero(),
            lambda: values[values > 0],
            lambda: values[[0, 2]],
            lambda: torch.tensor([1, 2], device="ipu:0"),
            lambda: torch.tensor([1, 2]).to(values),
            lambda: torch.accelerator.synchronize(values.device),
        ):
            waits.clear()
            wait()
            assert waits.total() == 1
