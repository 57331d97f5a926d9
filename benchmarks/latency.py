"""Times drafters of one size and several depths, in milliseconds a drafted token.

    python benchmarks/latency.py [--layers 1,2,4,8,16] [--params 30e6] [--alpha 0.7] [--repeat 15] [--out F.json] …

Further flags choose the target, as for infer.py (--pair, --target, --quantization …). Random Llama-shaped models of
nearly equal parameters, from wide with one layer to narrow with many, draft after the same prompt in turns with the
target; their tokens do not matter. Reproduces a finding of Decoding Speculative Decoding (arXiv 2402.01528):
latency grows with depth, not with width. The acceptance is not measured: `--alpha` gives it.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from app.command_line.arguments import read_request
from app.command_line.main import layers_of
from app.lanes.lane import PairEngine
from app.lanes.warm import passes, timed
from app.screen.output import load_engine, print_table, screen, small_table
from app.screen.terminal import Interrupts
from app.settings.table import Settings
from sampling.drafters.draft_model import ModelDrafter
from sampling.gamma.costs import pass_times
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.stats.theory import best_gamma
from sampling.types import Budget
from utils.errors import UsageError, UserError
from utils.files import write_json
from utils.kernels.quantized_linear import pack
from utils.logits_processors import make_processor
from utils.machine import machine

CONTEXT = 256  # tokens of the prompt
DRAFTS = 4  # a round
WIDTHS = (1, 2, 3, 5, 9, 17)  # tokens of the target's passes that are timed
HEAD = 64  # width of an attention head
MLP = 8 / 3  # its width over the model's, as in Llama; the shape nearest to this is taken
STEP = 8  # the MLP's width comes in such steps


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings: attention heads of 64, an MLP of `intermediate`."""

    layers: int
    hidden: int
    intermediate: int
    vocab_size: int

    @property
    def parameters(self) -> int:
        per_layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocab_size * self.hidden + self.layers * per_layer + self.hidden


def shape_of(layers: int, parameters: float, vocab_size: int) -> Shape:
    """Return the shape of `layers` layers with nearly `parameters` parameters whose MLP is nearest to 8/3 of its width.

    UsageError if even the narrowest has more.
    """
    shapes = []
    for hidden in range(HEAD, 1 << 14, HEAD):
        left = parameters - Shape(layers, hidden, 0, vocab_size).parameters
        shapes.append(Shape(layers, hidden, round(left / (3 * layers * hidden) / STEP) * STEP, vocab_size))
    wide = [shape for shape in shapes if shape.intermediate >= STEP]
    if not wide:
        least = Shape(layers, HEAD, STEP, vocab_size).parameters
        raise UsageError(
            f"--params must be at least {least:,} for {layers} layers and {vocab_size:,} ids, got {parameters:,.0f}"
        )
    return min(wide, key=lambda shape: abs(shape.intermediate / shape.hidden - MLP))


def main(words: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="1,2,4,8,16", help="depths to compare")
    parser.add_argument("--params", type=float, default=30e6, help="parameters that each shape has, nearly")
    parser.add_argument("--alpha", type=float, default=0.7, help="acceptance to predict speeds at")
    parser.add_argument("--repeat", type=int, default=15, help="times each shape drafts")
    parser.add_argument("--out", help="write every figure to this JSON file")
    args, rest = parser.parse_known_args(words)
    request = read_request(["check", *rest], os.environ)
    settings, options = layers_of(request).settings, request.options
    with Interrupts() as interrupt:
        engine = load_engine(settings, options.changed(drafter="none"), interrupt)
    shapes = [shape_of(int(layers), args.params, engine.target.vocab_size) for layers in args.layers.split(",")]
    seconds, verify = measure(engine, shapes, args.repeat)
    rows, target = figures(shapes, seconds, verify, args.alpha), engine.loaded.target.name
    title = f"drafters of nearly {args.params:,.0f} parameters beside {target}, alpha {args.alpha:g}"
    console = screen(settings, sys.stdout)
    print_table(console, title, _table(rows, settings))
    shown = ", ".join(f"{n}: {1000 * each:.3g}" for n, each in verify.items())
    console.print(f"ms of a target pass by tokens: {shown}; speeds are at each shape's best gamma", markup=False)
    if args.out is not None:
        about = {"target": target, "machine": machine(engine.loaded), "alpha": args.alpha}
        passing = {str(n): round(each, 7) for n, each in verify.items()}
        write_json(args.out, {**about, "pass_seconds": passing, "shapes": rows})
    return 0


def measure(engine: PairEngine, shapes: Sequence[Shape], repeats: int) -> tuple[list[float], dict[int, float]]:
    """Return the seconds of a drafted token of each shape, and of target passes by tokens: medians, in turns."""
    target = engine.loaded.target
    drafts = {("shape", at): drafting(shape, target.device, target.dtype) for at, shape in enumerate(shapes)}
    verifies = {("target", n): run for n, run in passes(engine.target.network, WIDTHS, CONTEXT).items()}
    laps = timed(drafts | verifies, repeats, target.device)
    seconds = {key: statistics.median(each) for key, each in laps.items()}
    return [seconds[key] / DRAFTS for key in drafts], {n: seconds["target", n] for n in WIDTHS}


def drafting(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that drafts 4 tokens with a random model of this shape; in float32 on the CPU it is packed, as
    in the console."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = shape.hidden // HEAD
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4 * CONTEXT,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    model = model.eval().requires_grad_(False).to(device=device, dtype=dtype)
    if device.type == "cpu" and dtype == torch.float32:
        pack(model)
    drafter = ModelDrafter(CausalLM(model, "drafter"))
    rows = [[token % shape.vocab_size for token in range(CONTEXT)]]
    session = drafter.lm.open(rows)
    drafter.start(rows, session, session)
    sampler = KeyedSampler(make_processor(0.0)).drafting([[0, CONTEXT]])
    return lambda: drafter.propose(rows, Budget([DRAFTS]), sampler)


def figures(
    shapes: Sequence[Shape], seconds: Sequence[float], verify: Mapping[int, float], alpha: float
) -> list[dict[str, Any]]:
    """Return a row for each shape: its cost, and the best gamma and speed at this acceptance."""
    times = pass_times(verify)
    single = times(1)
    rows = []
    for shape, spent in zip(shapes, seconds, strict=True):
        gamma, speedup = best_gamma(alpha, spent / single, lambda n: times(n) / single)
        rows.append(
            {
                **asdict(shape),
                "parameters": shape.parameters,
                "t_draft": round(spent, 7),
                "c": round(spent / single, 5),
                "over_first": round(spent / seconds[0], 4),
                "best_gamma": gamma,
                "expected_speedup": round(speedup, 4),
                "throughput": round(speedup / single, 4),
            }
        )
    return rows


def _table(rows: Sequence[dict[str, Any]], settings: Settings) -> Table:
    table = small_table(settings)
    for name in ("layers", "width", "MLP", "params", "draft ms", "c", "of 1st", "gamma", "tok/s", "S"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("layers", "hidden", "intermediate")),
            f"{row['parameters'] / 1e6:.1f}M",
            f"{1000 * row['t_draft']:.3g}",
            f"{row['c']:.3f}",
            f"{row['over_first']:.2f}x",
            str(row["best_gamma"]),
            f"{row['throughput']:.1f}",
            f"{row['expected_speedup']:.2f}",
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
