"""The cost of rounding a model, its weights or the inputs of its products: KL, agreement, perplexity and time.

    python benchmarks/rounding.py [--pair P|--target T] [--quantization q4|q8|int8|…] [--activations q8] …

Takes the flags of `infer.py check` that choose models. The target, and a drafter that is a model, read the built-in
questions as loaded and with float weights, both in memory at once. A file's own bits are compared with the
same numbers in float.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from app.command_line.arguments import read_request
from app.command_line.main import layers_of
from app.lanes.pairing import load_options
from app.lanes.warm import passes, timed
from app.prompts.questions import PROMPTS
from app.screen.output import load_engine
from app.screen.terminal import Interrupts
from sampling.models.causal import CausalLM
from sampling.models.network import network_of
from sampling.types import Network
from utils.catalogue.specs import ModelSpec
from utils.errors import UserError
from utils.kernels.build import why_not
from utils.loading.build import load_model
from utils.loading.loaded import LoadedModel, LoadOptions
from utils.loading.sources import model_folder

CONTEXT, REPEATS = 64, 9  # tokens before a timed pass; how often each is timed
OURS = {"int8": "q8", "nf4": "q4", "fp4": "q4"}  # bitsandbytes' kinds, and ours to compare with on a CPU


def main(words: Sequence[str]) -> int:
    """Load the pair and print a line for each model; return the exit code."""
    request = read_request(["check", *words], os.environ)
    options = load_options(request.options)
    with Interrupts() as interrupt:
        engine = load_engine(layers_of(request).settings, request.options, interrupt)
    loaded = engine.loaded
    models: list[tuple[LoadedModel, ModelSpec, Any]] = [(loaded.target, loaded.spec.target, engine.target)]
    if loaded.drafter is not None and isinstance(loaded.spec.drafter, ModelSpec):
        models.append((loaded.drafter, loaded.spec.drafter, engine.drafters.model))
    texts = [engine.tokenizer(turn)["input_ids"] for _, turns in PROMPTS for turn in turns]
    for model, spec, lm in models:
        sys.stdout.write(f"{compared(model, spec, lm, options, [ids[: lm.context] for ids in texts])}\n")
    return 0


def compared(model: LoadedModel, spec: ModelSpec, lm: CausalLM, options: LoadOptions, texts: list[list[int]]) -> str:
    """Return a line about a model beside its float weights. UserError if these cannot be loaded."""
    bare = spec.model_copy(update={"quantization": "none"})

    def load(kind: str) -> Network:
        folder = model_folder(bare, options)
        return network_of(load_model(bare, folder, options, str(model.device), kind).model)

    kind = model.quantization
    plain, others = load("none"), {kind if options.activations == "q16" else f"{kind}, q8 activations,": lm.network}
    if kind in OURS and model.device.type == "cpu" and not why_not():
        others[OURS[kind]] = load(OURS[kind])
    turns = {name: passes(network, (1,), CONTEXT)[1] for name, network in {"none": plain, **others}.items()}
    ms = {name: 1e3 * statistics.median(laps) for name, laps in timed(turns, REPEATS, model.device).items()}
    results, own = [], 0.0
    for name, other in others.items():
        kl, agreed, own, perplexity = divergence(plain, other, texts)
        shares = f"KL {kl:.2g}, greedy agreement {agreed:.4f}, perplexity {perplexity:.3f}"
        results.append(f"{name} has {shares}, {ms[name]:.1f} ms a pass")
    of = f"over {sum(map(len, texts))} tokens of the built-in questions"
    floats = f"perplexity {own:.3f}, {ms['none']:.1f} ms a pass"
    return f"{model.name} beside its float weights ({floats}) {of}: {'; '.join(results)}"


@torch.inference_mode()
def divergence(plain: Network, other: Network, texts: list[list[int]]) -> tuple[float, float, float, float]:
    """Return the mean KL(plain ‖ other) of the next token over all positions of `texts`, the share of equal likeliest
    tokens, and the perplexity of both."""
    total = torch.zeros(5, dtype=torch.float64)
    for ids in texts:
        p, q = (log_probs(network, ids) for network in (plain, other))
        follows = torch.tensor(ids[1:])[:, None]
        scores = [float(logs[:-1].gather(1, follows).sum()) for logs in (p, q)]
        agreed = float((p.argmax(-1) == q.argmax(-1)).sum())
        total += torch.tensor([float((p.exp() * (p - q)).sum()), agreed, *scores, len(ids)], dtype=torch.float64)
    kl, agreed, *scores, count = total.tolist()
    return kl / count, agreed / count, *(math.exp(-score / (count - len(texts))) for score in scores)


def log_probs(network: Network, ids: list[int]) -> torch.Tensor:
    """Return [n, V], the log-probabilities after each token."""
    given = torch.tensor([ids], device=network.device)
    positions = torch.arange(len(ids), device=network.device)[None]
    logits, _ = network.forward(given, positions, None, network.new_cache(1), len(ids))
    return logits[0].float().log_softmax(-1).cpu()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
