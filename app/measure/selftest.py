"""`selftest`: proves the machine's arithmetic and measures its speed, on any device, without a network.

Every check is named and is ok, failed with what was found, or skipped with the reason; what fails is listed, the rest
goes on. A JSON file and a page come out. What is proved app/measure/proofs.py knows; this file knows the parts, what
they need, and how they are told.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from app.lanes.answers import Answer, parting, run_lane
from app.lanes.comparison import gap_text
from app.lanes.costs import terms_of
from app.lanes.drafters import moved
from app.lanes.lane import PairEngine
from app.lanes.pairing import CATALOGUE, choose_pair, load_options
from app.lanes.pass_times import measure_costs
from app.measure.proofs import (
    SHARE,
    Amount,
    Checks,
    Found,
    PlantedDrafter,
    WrongError,
    core,
    make_drafter,
    make_target,
    noisy,
    placed,
    proved,
    surviving,
)
from app.prompts.questions import BUILT_IN, conversation, prompt_ids
from app.screen.output import LoadProgress, markdown_table, print_table, screen, small_table
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.drafters.draft_heads.checkpoint import target_rotary
from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.models.network import network_of
from sampling.sampler import KeyedSampler
from sampling.stats.metrics import Meter
from sampling.stats.summary import Stats, merge
from sampling.types import Drafter, FixedPace, Hidden, KVCache, Limits, Network
from utils.catalogue.specs import spec_from_argument
from utils.errors import UserError
from utils.files import writable_folder, write_json, write_text
from utils.kernels.packed_linear import lean, pack
from utils.loading.build import load_model, pick_device, pick_dtype
from utils.loading.loading import load_pair
from utils.loading.quiet import quiet_environment, quiet_libraries
from utils.loading.sources import model_folder
from utils.logits_processors import make_processor
from utils.machine import facts, version
from utils.progress import INTERRUPTED, Cancelled, Progress, never, silent
from utils.timing import Stopwatch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, GAMMAS = range(1, 10), range(1, 9)
HEADS = ("glide", "eagle")
SCALES = ((1, 32), (1, 16), (1, 8), (2, 16), (2, 8), (4, 8), (8, 4), (32, 2))
"""(divisor of a 7B model's widths and vocabulary, layers): the first that memory and time hold is measured."""
TAKEN = 0.6  # of the free memory is taken at most, with half as much again for heads, caches and packing
ALIKE = {"int8": 0.99, "nf4": 0.85}  # least cosine of quantised logits with the target's own
PATIENCE = 240.0  # seconds for two processes

State = Literal["ok", "failed", "skipped"]
Loaded = tuple[CausalLM, CausalLM, CausalLM]  # a quantised target, a drafter, the target in bfloat16


class SkippedError(Exception):
    """What cannot be done here, and why."""


@dataclass(frozen=True)
class Extent:
    """How much is done: of proofs; answers of the pair, how often, how long; of planted ones; seconds of passes."""

    amount: Amount
    answers: int
    repeats: int
    length: int
    planted: int
    seconds: float


WHOLE = Extent(Amount(), 7, 3, 64, 64, 30.0)
QUICK = Extent(Amount(2, 24, 1500), 1, 1, 24, 24, 2.0)


@dataclass(frozen=True)
class Check:
    """One named check and what came of it."""

    part: str
    name: str
    state: State
    text: str
    seconds: float
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Where everything runs, and with what."""

    device: torch.device
    options: ModelOptions
    settings: Settings
    extent: Extent
    progress: Progress = silent
    interrupted: Callable[[], bool] = never


def run_selftest(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Prove, measure, print and write; 1 if anything failed."""
    folder = Path(args.out)
    writable_folder(folder)
    quiet_environment()
    quiet_libraries()
    device = pick_device(options.device)
    begun = time.perf_counter()
    with LoadProgress(sys.stderr, quiet=settings.quiet) as progress, Interrupts() as interrupted:
        extent = QUICK if args.quick else WHOLE
        place = Place(device, options, settings, extent, progress, interrupted)
        checks = run_parts({part: PARTS[part] for part in PARTS if part in args.parts}, place)
    count = {state: sum(check.state == state for check in checks) for state in ("ok", "failed", "skipped")}
    report = {
        "program": version(),
        "command": args.command,
        "machine": facts(device),
        "summary": {**count, "seconds": round(time.perf_counter() - begun, 1)},
        "checks": [asdict(check) for check in checks],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "selftest.json", report)
    write_text(folder / "selftest.md", page(report))
    show(report, settings, folder)
    return INTERRUPTED if interrupted() else int(count["failed"] > 0)


def run_parts(parts: Mapping[str, Callable[[Place], Checks]], place: Place) -> list[Check]:
    """Every check of every part; what goes wrong is its own affair. An interrupt ends all."""
    found: list[Check] = []
    for number, (part, checks) in enumerate(parts.items()):
        steps = checks(place)
        while True:
            begun, name = time.perf_counter(), "preparing"
            try:
                place.progress(part, number / len(parts))
                if (step := next(steps, None)) is None:
                    break
                name, act = step
                text, figures = act()
                state: State = "ok"
            except Cancelled:
                return found
            except Exception as error:
                state, text, figures = _went_wrong(error)
            found.append(Check(part, name, state, text, round(time.perf_counter() - begun, 2), figures))
            if place.interrupted():
                return found
            if name == "preparing":
                break  # what raised is at its end
    return found


def _went_wrong(error: Exception) -> tuple[State, str, dict[str, Any]]:
    said = " ".join(str(error).split())[:300]
    if isinstance(error, SkippedError):
        return "skipped", said, {}
    kind = "" if isinstance(error, WrongError | UserError) else f"{type(error).__name__}: "
    return "failed", f"{kind}{said}", {}


# -- the parts --------------------------------------------------------------------------------------


def proofs(place: Place) -> Checks:
    """The proofs' core in every number format."""
    for dtype in DTYPES:
        yield from surviving(str(dtype).removeprefix("torch."), core(place.device, dtype, place.extent.amount))


def quantized(place: Place) -> Checks:
    """Random targets loaded in 8 and 4 bits by bitsandbytes: near the unrounded one, and as exact with drafts."""
    for kind in ALIKE:
        yield from surviving(kind, _quantized(kind, place))


def _quantized(kind: str, place: Place) -> Checks:
    found: dict[int, Loaded] = {}

    def load() -> Found:
        if place.device.type not in ("cpu", "cuda"):
            raise SkippedError(f"bitsandbytes does not run on {place.device.type}")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise SkippedError("the package bitsandbytes is not installed")
        likeness = [_in_few_bits(kind, vocab, place, found) for vocab in (40, 6)]
        told = f"cosine of its logits with the unrounded target's {min(likeness):.4f}"
        if not min(likeness) > ALIKE[kind]:
            raise WrongError(f"{told}, at least {ALIKE[kind]} is expected")
        return told, {"cosine": min(likeness)}

    yield f"{kind}: loading", load
    if len(found) == 2:
        # On a CPU the products of 4 bits are made in bfloat16, whatever the format of what goes in and out.
        (target, drafter, rounded), (few, guess, _) = found.values()
        makers = {"model chain": lambda script: ModelDrafter(drafter)}
        counting = {"token by token": ModelDrafter(guess)}
        yield from proved(kind, (target, few), makers, counting, place.extent.amount, rounded)


def _in_few_bits(kind: str, vocab: int, place: Place, found: dict[int, Loaded]) -> float:
    """Load a random target in `kind`, note it in `found`; how like the unrounded one's its logits are."""
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
    dense = make_target(vocab, 11, **shape)
    with tempfile.TemporaryDirectory() as folder:
        dense.save_pretrained(folder)
        spec, given = spec_from_argument(folder), load_options(place.options.changed(dtype="auto"))
        loaded = load_model(spec, Path(folder), given, str(place.device), kind, silent, never)
    guess, rounded = (placed(noisy(dense, noise), place.device, torch.bfloat16) for noise in (0.1, 0.0))
    found[vocab] = CausalLM(loaded.model), CausalLM(guess, "drafter"), CausalLM(rounded)
    ids = torch.arange(24)[None] % vocab
    with torch.inference_mode():
        theirs, ours = dense(ids).logits, loaded.model(ids.to(place.device)).logits.float().cpu()
    return float(F.cosine_similarity(theirs.flatten(), ours.flatten(), dim=0))


def pair(place: Place) -> Checks:
    """The pair that the options name (else the default one): short answers, plain and with drafts."""
    spec, given = choose_pair(place.options), load_options(place.options)
    if not (place.options.target or place.options.drafter or place.options.pair):
        try:
            model_folder(spec.target, given, place.progress, place.interrupted)
        except UserError as error:
            raise SkippedError(f"{spec.target.name} is not here: {error}") from error
    engine = PairEngine(load_pair(spec, given, place.progress, place.interrupted))
    limit = {"max_new_tokens": place.extent.length, "temperature": 0}
    settings = place.settings.changed(**{**spec.defaults, **limit})
    text = conversation(engine, settings).text
    every = len(BUILT_IN) // (place.extent.answers + 1)
    warm_up, *prompts = [one.turns[0] for one in BUILT_IN[::every][: place.extent.answers + 1]]
    answers: dict[str, list[Answer]] = {"ar": [], "spec": []}

    def identity() -> Found:
        for turn, prompt in enumerate((warm_up, *prompts * place.extent.repeats)):
            ids = prompt_ids(engine, prompt, settings)
            for method in [*answers][:: -1 if turn % 2 else 1]:
                engine.forget()  # as bench does: what earlier answers taught is no answer's own
                lane = engine.lane(method, settings)
                one = run_lane(lane, ids, text, interrupt=place.interrupted, terms=terms_of(lane, engine))
                answers[method] += [one] if turn else []
        tied = 0
        for number, (plain, drafted) in enumerate(zip(answers["ar"], answers["spec"], strict=True), start=1):
            if (found := parting(plain, drafted)) is not None:
                if found.kind != "near tie":
                    gap = gap_text(found.gap, plain.terms.precision, engine.invariant)
                    raise WrongError(f"with drafts answer {number} differs at token {found.position + 1}{gap}")
                tied += 1
        count, tokens = len(answers["ar"]), sum(len(one.ids) for one in answers["ar"])
        same = "all the same" if not tied else f"{tied} of them part at a near tie"
        return f"{count} answers of {tokens} tokens in all, {same}", {"ids": [one.ids for one in answers["ar"]]}

    def speed() -> Found:
        rates = {method: _rate(merge([one.stats for one in said])) for method, said in answers.items() if said}
        if len(rates) < 2:
            raise WrongError("there is no answer to measure")
        ratio = rates["spec"] / rates["ar"]
        told = f"{rates['ar']:.1f} tokens/s plain, {rates['spec']:.1f} with drafts: {ratio:.2f}x"
        return told, {"plain": rates["ar"], "drafts": rates["spec"], "ratio": ratio}

    yield f"{spec.name}: identity", identity
    yield f"{spec.name}: speed", speed


class Scripted:
    """A network whose passes are real and whose logits name one token: what `script` [N] says at the next position."""

    def __init__(self, network: Network, script: Sequence[int]) -> None:
        self._network, self._script = network, torch.tensor(script, device=network.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`sampling.types.Network`."""
        logits, states = self._network.forward(ids, positions, mask, cache, keep, hidden)
        following = self._script[positions[:, -keep:] + 1]
        return logits.scatter(-1, following[..., None], torch.finfo(logits.dtype).max / 2), states


def passes(place: Place) -> Checks:
    """A target of a 7B model's shape, as large as the device holds: its passes, and heads with planted acceptance."""
    device, extent = place.device, place.extent
    dtype = pick_dtype(place.options.dtype, device, torch.bfloat16)
    bandwidth = copied(device)
    scale = scale_of(device, dtype, bandwidth, extent)
    model = shaped(scale, device, dtype)
    read = weights(scale) * dtype.itemsize
    network = network_of(model)
    what = f"1/{scale[0]} of a 7B model's width, {scale[1]} layers" if scale[0] > 1 else f"{scale[1]} of 32 layers"

    def floor() -> Found:
        costs = measure_costs(network, ROWS, context=64, repeats=5)
        least = read / bandwidth
        one, nine = costs[1], costs[ROWS[-1]]
        told = (
            f"{what}, {read / 1e9:.2f} GB in {str(dtype).removeprefix('torch.')}: 1 row {1e3 * one:.3g} ms, "
            f"{one / least:.2f}x the floor of {1e3 * least:.3g} ms ({bandwidth / 1e9:.1f} GB/s by a copy); "
            f"9 rows {1e3 * nine:.3g} ms, v(9) = {nine / one:.2f}"
        )
        seconds = {str(rows): spent for rows, spent in costs.items()}
        return told, {"bytes": read, "bandwidth": bandwidth, "floor": least, "seconds": seconds}

    yield "passes over 1 to 9 rows", floor
    script = [(7 * at * at + 3 * at) % network.vocab_size for at in range(32 + extent.planted + ROWS[-1] + 1)]
    target = CausalLM(Scripted(network, script))
    plain: list[float] = []

    def planted(kind: str) -> Found:
        if not plain:
            plain.append(_rate(_decoded(target, script, NoDrafter(), 0, extent.planted)))
        drafter = PlantedDrafter(
            make_drafter(head_of(kind, model, device, dtype), network.layers), script, SHARE, network.vocab_size
        )
        _decoded(target, script, drafter, 2, extent.planted)  # a warm-up
        rows = {}
        for gamma in GAMMAS:
            stats = _decoded(target, script, drafter, gamma, extent.planted)
            rows[str(gamma)] = {"tokens_per_second": _rate(stats), "speedup": _rate(stats) / plain[0]}
        best = max(rows, key=lambda gamma: rows[gamma]["speedup"])
        told = (
            f"{SHARE:.0%} of drafts right by plan: {plain[0]:.3g} tokens/s plain, at best {rows[best]['speedup']:.2f}x "
            f"(gamma {best}); every text is the target's"
        )
        return told, {"share": SHARE, "plain": plain[0], "gammas": rows}

    for kind in HEADS:
        yield f"{kind.upper()}-shaped head, gamma 1 to 8", partial(planted, kind)


def _rate(stats: Stats) -> float:
    return stats.predicted_per_second or 0.0


def _decoded(target: CausalLM, script: list[int], drafter: Drafter, gamma: int, length: int) -> Stats:
    """The figures of an answer; WrongError where it is not the script's."""
    prompt, sampler = script[:32], KeyedSampler(make_processor(0.0))
    meter = Meter(prompt_n=len(prompt))
    for event in generate(target, [prompt], drafter, sampler, Limits(length), pace=FixedPace(gamma)):
        meter.add(event)
    if meter.ids != script[32 : 32 + length]:
        raise WrongError(f"at gamma {gamma} the text is not the target's")
    return meter.stats


def copied(device: torch.device, size: int = 1 << 28) -> float:
    """Bytes a second that the device reads and writes, by copying so many: the best of some."""
    one = torch.zeros(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    watch, best = Stopwatch(device), 0.0
    for _ in range(6):
        other.copy_(one)
        best = max(best, 2 * size / watch.lap())
    return best


def widths(scale: tuple[int, int]) -> tuple[int, int, int, int]:
    """Hidden size, that of the MLP, heads and ids."""
    by = scale[0]
    return 4096 // by, 11008 // by, 32 // by, 32000 // by


def weights(scale: tuple[int, int]) -> int:
    """Weights that a pass reads: all but the embedding."""
    hidden, inner, _, ids = widths(scale)
    return scale[1] * (4 * hidden**2 + 3 * hidden * inner) + ids * hidden


def scale_of(device: torch.device, dtype: torch.dtype, bandwidth: float, extent: Extent) -> tuple[int, int]:
    """The largest scale that the free memory holds and whose passes take about the seconds of the extent at most."""
    import psutil

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    passing = 6 * len(ROWS) + (1 + len(HEADS) * len(GAMMAS) / 2) * extent.planted
    for scale in SCALES:
        needed = weights(scale) * dtype.itemsize
        if 1.5 * needed <= TAKEN * free and passing * needed / bandwidth <= extent.seconds:
            return scale
    return SCALES[-1]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """What is made inside lies on the device; its noise is the seed's alone."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), device:
        torch.manual_seed(seed)
        yield


def shaped(scale: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Any:
    """The random target, as the console would run it: packed on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, heads, ids = widths(scale)
    config = LlamaConfig(
        vocab_size=ids,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=scale[1],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with seeded(0, device):
        family: Any = LlamaForCausalLM
        model: Any = family._from_config(config, dtype=dtype)
    model = model.eval().requires_grad_(False)
    if device.type == "cpu" and dtype == torch.float32:
        pack(model)
        lean(model)
    return model


def head_of(kind: str, model: Any, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """A random draft head of one layer as wide as its target's: GLIDE, or EAGLE as published first."""
    large = model.config
    config = DraftHeadConfig(
        kind=kind,  # type: ignore[arg-type]
        vocab_size=large.vocab_size,
        hidden_size=large.hidden_size,
        intermediate_size=large.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=large.num_attention_heads,
        num_key_value_heads=large.num_key_value_heads,
        head_dim=large.head_dim,
        large_hidden_size=large.hidden_size,
        large_num_attention_heads=large.num_attention_heads,
        large_head_dim=large.head_dim,
        max_position_embeddings=large.max_position_embeddings,
        reads=(-1,) if kind == "eagle" else (),
    )
    with seeded(1, device):
        head = DraftHead(config)
    head.adopt(None, target_rotary(model))
    return moved(head.eval().requires_grad_(False), device, dtype, model)


def processes(place: Place) -> Checks:
    """A target shared by two processes, a GPU each."""
    count = torch.cuda.device_count() if place.device.type == "cuda" else 0
    if count < 2:
        raise SkippedError(f"takes two GPUs, --device {place.device.type} has {count} here")
    yield "two processes share a target", partial(shared, "cuda")


def shared(device: str) -> Found:
    """A random target says under torchrun, in two parts, what it says in one."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_target(256, 11, num_attention_heads=4, num_key_value_heads=2)
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        words = ["run", "tell me", "--target", folder, "--drafter", "ngram", "--compare", "ar,spec", "--gamma", "4"]
        words += ["--device", device, "--dtype", "float32", "--max-new-tokens", "24", "--json", "--quiet"]
        program = [str(CATALOGUE.parent / "infer.py"), *words]
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        alone, both = (_said([sys.executable, *how]) for how in (program, [*start, *program, "--tp-size", "2"]))
    if alone != both:
        raise WrongError("two processes say something else than one")
    return f"{sum(map(len, both.values()))} tokens, the same as in one process", {"ids": both}


def _said(command: list[str]) -> dict[str, list[int]]:
    """The ids of each lane of `run --json`."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or done.stderr.splitlines()
        raise WrongError(f"{'torchrun' if 'torch.distributed.run' in command else 'one process'} failed: {told[:1]}")
    return {one["method"]: one["ids"] for one in json.loads(done.stdout)["results"]}


def _tokenizer() -> Any:
    """One token a byte."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made: Any = transformers.PreTrainedTokenizerFast
    return made(tokenizer_object=inner)


PARTS: Mapping[str, Callable[[Place], Checks]] = {
    "proofs": proofs,
    "quantized": quantized,
    "pair": pair,
    "passes": passes,
    "processes": processes,
}

# -- how it is told ---------------------------------------------------------------------------------


def headline(report: Mapping[str, Any]) -> str:
    """ "25 ok, 0 failed, 1 skipped in 80.1 s"."""
    count = report["summary"]
    return f"{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped in {count['seconds']:.0f} s"


def page(report: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    here = report["machine"]
    where = here["gpu"] or f"{here['cpu_count']} cores, {here['threads']} threads"
    lines = [
        f"# Selftest: {headline(report)}",
        "",
        f"`{report['command']}`",
        "",
        f"{report['program']} on {here['device']} ({where}), {here['system']}, Python {here['python']}, "
        f"torch {here['torch']}, transformers {here['transformers']}, {here['date']}",
        "",
    ]
    rows = [(one["part"], one["name"], one["state"], one["text"], f"{one['seconds']:.1f}") for one in report["checks"]]
    lines.append(markdown_table(("part", "check", "state", "what was found", "s"), rows))
    for one in report["checks"]:
        if seconds := one["figures"].get("seconds"):
            lines += ["", "## Passes against the bandwidth floor", ""]
            floor = one["figures"]["floor"]
            cells = [(n, f"{1e3 * spent:.3g}", f"{spent / floor:.2f}x") for n, spent in seconds.items()]
            lines.append(markdown_table(("rows", "ms", "of the floor"), cells))
        if gammas := one["figures"].get("gammas"):
            lines += ["", f"## {one['name']}", ""]
            cells = [(g, f"{row['tokens_per_second']:.3g}", f"{row['speedup']:.2f}x") for g, row in gammas.items()]
            lines.append(markdown_table(("gamma", "tokens/s", "of plain"), cells))
    return "\n".join(lines) + "\n"


def show(report: Mapping[str, Any], settings: Settings, folder: Path) -> None:
    """The table on standard output."""
    console, table = screen(settings, sys.stdout), small_table(settings)
    for name in ("check", "state", "what was found"):
        table.add_column(name, overflow="fold")
    for one in report["checks"]:
        table.add_row(f"{one['part']}: {one['name']}", one["state"], one["text"])
    print_table(console, headline(report), table)
    console.print(f"written to {folder / 'selftest.md'} and selftest.json", markup=False, soft_wrap=True)
