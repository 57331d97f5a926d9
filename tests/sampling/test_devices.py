"""Proofs and speeds on the device of --device: `python -m pytest -m device --device cuda [--speeds]`, cpu by default.

Random models made from a seed, targets in 8 and 4 bits, the default pair; and faults put in on purpose, which the
proofs must find. `--speeds` measures too, and a summary of the speeds stands at the end.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sampling.loop
import sampling.verify.rules
from app.lanes.answers import parting, run_lane
from app.lanes.costs import terms_of
from app.lanes.lane import PairEngine
from app.lanes.pairing import CATALOGUE, catalogue_in
from app.lanes.warm import measure_costs
from app.prompts.questions import BUILT_IN, conversation, prompt_ids
from app.settings.table import Settings
from sampling.drafters.draft_model import NoDrafter
from sampling.loop import generate
from sampling.models.cache import Buffer
from sampling.models.causal import CausalLM, CausalSession
from sampling.models.llama import FixedNetwork, LlamaNetwork
from sampling.models.network import network_of
from sampling.stats.metrics import Meter
from sampling.stats.summary import merge
from sampling.types import Draft, Drafter, FixedPace, Limits, Moves, Rows, Rule, Sampler, Verdict
from sampling.verify.rules import Keys
from tests.support import proofs
from tests.support.proofs import NAMES, Amount, PlantedDrafter, Proofs, ScriptedNetwork, placed
from tests.support.refusals import refused
from tests.support.runs import crossed, greedy
from tests.support.students import make_target
from tests.support.tiny import noisy_copy
from utils.catalogue.specs import spec_from_argument
from utils.device_map import Graphs
from utils.errors import UserError
from utils.kernels.quantized_linear import pack
from utils.loading.build import load_model
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair
from utils.progress import never
from utils.timing import Stopwatch

pytestmark = pytest.mark.device
FORMATS = ("float32", "bfloat16", "float16")
ALIKE = {"int8": 0.99, "nf4": 0.85}  # least cosine of quantised logits with the target's own
SMALL = Amount(2, 24, 1000)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def speed(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Notes a line for the summary of speeds; without --speeds the test is skipped."""
    if not request.config.getoption("--speeds"):
        pytest.skip("--speeds measures")
    return lambda line: record_property("speed", line)


@functools.cache
def proofs_on(device: torch.device, precision: str) -> Proofs:
    return Proofs(device, precision, SMALL if device.type == "cpu" else Amount())


@functools.cache
def in_few_bits(kind: str, device: torch.device, folder: Path) -> tuple[Proofs, float]:
    """The proofs of random targets in `kind`, and the least likeness of their logits with the unrounded ones."""
    found: list[tuple[CausalLM, CausalLM, CausalLM, float]] = []
    for vocab in (40, 6):
        shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
        dense = make_target(vocab, 11, **shape)
        dense.save_pretrained(folder / f"{vocab}")
        spec, ids = spec_from_argument(str(folder / f"{vocab}")), torch.arange(24)[None] % vocab
        loaded = load_model(spec, folder / f"{vocab}", LoadOptions(), str(device), kind)
        with torch.inference_mode():
            theirs, ours = dense(ids).logits, loaded.model(ids.to(device)).logits.float().cpu()
        guess, rounded = (placed(noisy_copy(dense, noise), device, torch.bfloat16) for noise in (0.1, 0.0))
        like = float(F.cosine_similarity(theirs.flatten(), ours.flatten(), dim=0))
        found.append((CausalLM(loaded.model), CausalLM(guess, "drafter"), CausalLM(rounded), like))
    (target, drafter, rounded_target, _), (few, guess_lm, _, _) = found
    # On a CPU the products of 4 bits are made in bfloat16, whatever the format of what goes in and out.
    proof = Proofs(device, kind, SMALL, (target, few, drafter, guess_lm), rounded_target)
    return proof, min(likeness for *_, likeness in found)


@pytest.mark.parametrize(("name", "precision"), crossed(NAMES, FORMATS))
def test_drafts_change_no_text_no_distribution_and_no_cache(name: str, precision: str, device: torch.device) -> None:
    proofs_on(device, precision).run(name)


@functools.cache
def recorded_proofs(device: torch.device, precision: str) -> Proofs:
    """The proofs of targets whose short passes are recorded, as graphs where the device has them."""
    capture: Any = Graphs() if device.type == "cuda" else lambda function: function
    dtype, models = getattr(torch, precision), (make_target(), make_target(6, seed=3))
    guesses = [CausalLM(placed(noisy_copy(model, 0.1), device, dtype), "drafter") for model in models]
    target, few = (CausalLM(FixedNetwork(LlamaNetwork(placed(model, device, dtype)), capture)) for model in models)
    return Proofs(device, precision, SMALL, (target, few, guesses[0], guesses[1]))


@pytest.mark.parametrize(
    ("name", "precision"), crossed(["passes of different width", "identity, model chain", "cache audit"], FORMATS)
)
def test_recorded_passes_change_no_text_and_no_cache(name: str, precision: str, device: torch.device) -> None:
    recorded_proofs(device, precision).run(name)


@pytest.mark.parametrize("kind", ALIKE)
def test_targets_in_few_bits_are_like_the_unrounded_ones_and_as_exact_with_drafts(
    kind: str, device: torch.device, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    proof, likeness = in_few_bits(kind, device, tmp_path)
    assert likeness > ALIKE[kind]
    for name in (name for name in NAMES if name.partition(", ")[2] in ("", "model chain", "token by token")):
        proof.run(name)


def default_engine(device: torch.device) -> PairEngine:
    catalogue = catalogue_in(CATALOGUE)
    try:
        return PairEngine(load_pair(catalogue.pair(None), LoadOptions(device=str(device), quantization="auto")))
    except UserError as error:
        pytest.skip(f"the default pair cannot be loaded: {error}")


def test_the_default_pair_answers_as_plain_decoding_does(
    device: torch.device, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    engine, count = default_engine(device), 1 if device.type == "cpu" else 7
    spec = engine.loaded.spec
    settings = Settings().changed(**{**spec.defaults, "max_new_tokens": 24, "temperature": 0})
    text, stats = conversation(engine, settings).text, {"ar": [], "spec": []}
    for question in BUILT_IN[:: len(BUILT_IN) // count][:count]:
        ids, answers = prompt_ids(engine, question.turns[0], settings), []
        for method, seen in stats.items():
            engine.forget()
            lane = engine.lane(method, settings)
            answers.append(run_lane(lane, ids, text, interrupt=never, terms=terms_of(lane, engine)))
            seen.append(answers[-1].stats)
        parted = parting(*answers)
        assert parted is None or parted.kind == "near tie", parted
    plain, drafted = (merge(seen).predicted_per_second for seen in stats.values())
    if request.config.getoption("--speeds"):
        record_property("speed", f"{spec.name}: {plain:.1f} tokens/s plain, {drafted:.1f} with drafts")


# -- speeds -----------------------------------------------------------------------------------------

SCALES = ((1, 32), (1, 16), (1, 8), (2, 16), (2, 8), (4, 8), (8, 4), (32, 2))
"""(divisor of a 7B model's widths and vocabulary, layers): the first that half of the memory holds is measured."""


def large_target(device: torch.device) -> tuple[Any, str, int]:
    """A random target of a 7B model's shape, as large as the device holds; in words; bytes that a pass reads."""
    import psutil
    from transformers import LlamaConfig, LlamaForCausalLM

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available / 16
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def weights(scale: tuple[int, int]) -> int:
        hidden, inner, ids = 4096 // scale[0], 11008 // scale[0], 32000 // scale[0]
        return (scale[1] * (4 * hidden**2 + 3 * hidden * inner) + ids * hidden) * dtype.itemsize

    by, layers = scale = next((scale for scale in SCALES if 1.5 * weights(scale) < free / 2), SCALES[-1])
    config = LlamaConfig(
        vocab_size=32000 // by,
        hidden_size=4096 // by,
        intermediate_size=11008 // by,
        num_hidden_layers=layers,
        num_attention_heads=32 // by,
        num_key_value_heads=32 // by,
        max_position_embeddings=4096,
    )
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), device:
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype)
    model = model.eval().requires_grad_(False)
    if device.type == "cpu":
        pack(model)
    return model, f"1/{by} of a 7B model's width, {layers} layers", weights(scale)


def copied(device: torch.device, size: int = 1 << 28) -> float:
    """Bytes a second that the device reads and writes, by copying so many: the best of some."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    watch, best = Stopwatch(device), 0.0
    for _ in range(6):
        target.copy_(source)
        best = max(best, 2 * size / watch.lap())
    return best


def test_passes_of_a_large_target_and_planted_drafts_are_timed(
    device: torch.device, speed: Callable[[str], None]
) -> None:
    model, shape, read = large_target(device)
    network = network_of(model)
    costs, floor = measure_costs(network, range(1, 10), context=64, repeats=5), read / copied(device)
    speed(
        f"{shape}: 1 row {1e3 * costs[1]:.3g} ms, {costs[1] / floor:.2f}x the floor of {1e3 * floor:.3g} ms by a copy; "
        f"v(9) {costs[9] / costs[1]:.2f}"
    )
    script = [(7 * at * at + 3 * at) % network.vocab_size for at in range(120)]
    target = CausalLM(ScriptedNetwork(network, script))

    def rate(drafter: Drafter, gamma: int) -> float:
        meter, sampler = Meter(prompt_n=32), greedy()
        for event in generate(target, [script[:32]], drafter, sampler, Limits(64), pace=FixedPace(gamma)):
            meter.add(event)
        assert meter.ids == script[32:96]
        return meter.stats.predicted_per_second or 0.0

    plain = statistics.median(rate(NoDrafter(), 0) for _ in range(3))
    for gamma in (1, 2, 4, 8):
        planted = PlantedDrafter(NoDrafter(), script, proofs.SHARE, network.vocab_size)
        gain = statistics.median(rate(planted, gamma) for _ in range(3)) / plain
        speed(
            f"{shape}: {proofs.SHARE:.0%} of drafts right by plan, gamma {gamma}: {gain:.2f}x of {plain:.1f} tokens/s"
        )


# -- negative controls: faults put in on purpose ----------------------------------------------------

real_verify = sampling.loop.verify


def accepts_one_more(
    logits: torch.Tensor, draft: Draft, rows: Rows, keys: Keys, sampler: Sampler, rule: Rule
) -> Verdict:
    """Of a chain the first refused draft is taken all the same."""
    verdict = real_verify(logits, draft, rows, keys, sampler, rule)
    if not all(tree.is_chain for tree in draft.trees):
        return verdict
    rows_taken = zip(draft.trees, verdict.path, strict=True)
    return replace(verdict, path=[list(range(min(len(path) + 1, len(tree.tokens)))) for tree, path in rows_taken])


def cropped_only(self: Buffer, moves: Moves, length: int, index: torch.Tensor | None = None) -> None:
    """What a tree's accepted nodes have left in the cache stays where it was."""
    self.crop(length)


LEAVES = r"the text leaves plain decoding's at token \d+"
FAULTS: dict[str, tuple[Any, str, Any, dict[str, str]]] = {  # where, what, what instead, which proofs say what
    "a wrong acceptance rule": (
        *(sampling.loop, "verify", accepts_one_more),
        {
            **dict.fromkeys(("identity, model chain", "identity, feature head"), LEAVES),
            **dict.fromkeys(
                ("counting, token by token", "counting, block"), "sampled text has not the target's distribution"
            ),
        },
    ),
    "a refusal answered by a draw from the whole distribution": (
        *(sampling.verify.rules, "residual", lambda p, q: p),
        {"counting, token by token": "sampled text has not the target's distribution"},
    ),
    "a cache that is not rolled back": (
        *(Buffer, "crop", lambda self, length: None),
        {"cache audit": r"after \d+ rounds logits are .* off those of a fresh cache"},
    ),
    "a tree whose path is not moved together": (
        *(Buffer, "shift", cropped_only),
        {
            "identity, branching tree": LEAVES,
            "cache audit": r"after \d+ rounds logits are .* off those of a fresh cache",
        },
    ),
}


@pytest.mark.parametrize(("fault", "precision"), crossed(FAULTS, ["float32", "bfloat16"]))
def test_a_fault_put_in_on_purpose_is_found_and_named(
    fault: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, instead, named = FAULTS[fault]
    monkeypatch.setattr(where, name, instead)
    proof = Proofs(CPU, precision, SMALL)
    proof.run("passes of different width")
    for check, said in named.items():
        refused(proof.run, check, kind=AssertionError, match=said)


def test_drafts_that_share_one_fate_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "SHARE", 1.0)
    refused(Proofs(CPU, "float32", SMALL).run, "identity, feature head", kind=AssertionError, match="nothing is proved")


def test_logits_that_are_no_numbers_are_no_rounding() -> None:
    model = make_target()
    model.lm_head.weight[0] = float("nan")
    lms = [CausalLM(model) for _ in range(4)]
    refused(
        Proofs(CPU, "float32", SMALL, (lms[0], lms[1], lms[2], lms[3])).run,
        "passes of different width",
        kind=AssertionError,
        match="logits of passes of different width lie inf apart",
    )


def test_a_network_whose_wide_passes_are_wrong_cannot_hide_behind_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CausalSession.cut

    def cut(self: CausalSession, logits: torch.Tensor) -> torch.Tensor:
        return real(self, logits) + 0.1 * (logits.shape[1] > 1) * torch.arange(logits.shape[-1])

    monkeypatch.setattr(CausalSession, "cut", cut)
    refused(Proofs(CPU, "float32", SMALL).run, "passes of different width", kind=AssertionError, match="float32 allows")
