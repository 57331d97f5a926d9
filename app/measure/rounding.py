"""What it costs to round a model, its weights or what its products take in: KL, agreement, perplexity and time.

Reads the built-in questions with both, so for a moment its float weights are in memory too. Knows no drafting.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, cast

import torch

from app.lanes.lane import PairEngine
from app.lanes.pass_times import passes, timed
from app.prompts.built_in import PROMPTS
from sampling.models.causal import CausalLM
from sampling.models.network import network_of
from sampling.types import Network
from utils.catalogue.specs import ModelSpec
from utils.errors import UserError
from utils.kernels.build import why_not
from utils.kernels.quantized_linear import KINDS
from utils.loading.build import load_model
from utils.loading.loaded import LoadedModel, LoadOptions
from utils.loading.quantization import BITSANDBYTES
from utils.loading.sources import model_folder
from utils.progress import Progress

CONTEXT, REPEATS = 64, 9  # of the passes that are timed
OURS = {"int8": "q8", "nf4": "q4", "fp4": "q4"}  # bitsandbytes' kinds, and ours that is shown beside on a CPU


def rounding_lines(
    engine: PairEngine, options: LoadOptions, files: bool, progress: Progress, cancelled: Callable[[], bool]
) -> list[str]:
    """A line for the target and for a drafter that is a model, where something was rounded at load; with `files` also
    where a file's own bits are computed with, whose float weights are the same numbers."""
    loaded, found = engine.loaded, [(engine.loaded.target, engine.loaded.spec.target, engine.target)]
    if loaded.drafter is not None and isinstance(engine.drafter, CausalLM):
        found.append((loaded.drafter, cast(ModelSpec, loaded.spec.drafter), engine.drafter))
    if engine.encodes:
        return []
    texts = [engine.tokenizer(turn)["input_ids"] for _, turns in PROMPTS for turn in turns]
    lines = []
    for model, spec, lm in found:
        rounded = model.quantization in (*KINDS, *BITSANDBYTES) or options.activations == "q8"
        if rounded or (files and model.quantization != "none"):
            bare = spec.model_copy(update={"quantization": "none"})

            def unrounded(kind: str, model: LoadedModel = model, bare: Any = bare) -> Network:
                folder, place = model_folder(bare, options, progress, cancelled), str(model.device)
                return network_of(load_model(bare, folder, options, place, kind, progress, cancelled).model)

            context = lm.context
            shown = model.quantization if options.activations == "q16" else f"{model.quantization}, q8 activations,"
            lines.append(_line(model, shown, lm.network, unrounded, [ids[:context] for ids in texts]))
    return lines


def _line(
    model: LoadedModel, shown: str, network: Network, load: Callable[[str], Network], texts: list[list[int]]
) -> str:
    kind = model.quantization
    try:
        plain = load("none")
        others = {shown: network}
        if kind in OURS and model.device.type == "cpu" and not why_not():
            others[OURS[kind]] = load(OURS[kind])
    except UserError as error:
        return f"what {shown} costs {model.name} is not known: {error}"
    turns = {name: passes(one, (1,), CONTEXT)[1] for name, one in {"none": plain, **others}.items()}
    ms = {name: 1e3 * statistics.median(laps) for name, laps in timed(turns, REPEATS, model.device).items()}
    said, own = [], 0.0
    for name, one in others.items():
        kl, agreed, own, perplexity = divergence(plain, one, texts)
        shares = f"KL {kl:.2g}, greedy agreement {agreed:.4f}, perplexity {perplexity:.3f}"
        said.append(f"{name} has {shares}, {ms[name]:.1f} ms a pass")
    of = f"over {sum(map(len, texts))} tokens of the built-in questions"
    floats = f"perplexity {own:.3f}, {ms['none']:.1f} ms a pass"
    return f"{model.name} beside its float weights ({floats}) {of}: {'; '.join(said)}"


@torch.inference_mode()
def divergence(plain: Network, other: Network, texts: list[list[int]]) -> tuple[float, float, float, float]:
    """Mean KL(plain ‖ other) of the next token over all places of `texts`, how often the likeliest are the same, and
    the perplexity of both."""
    total = torch.zeros(5, dtype=torch.float64)
    for ids in texts:
        p, q = (_log_probs(network, ids) for network in (plain, other))
        follows = torch.tensor(ids[1:])[:, None]
        told = [float(one[:-1].gather(1, follows).sum()) for one in (p, q)]
        agreed = float((p.argmax(-1) == q.argmax(-1)).sum())
        total += torch.tensor([float((p.exp() * (p - q)).sum()), agreed, *told, len(ids)], dtype=torch.float64)
    kl, agreed, *told, count = total.tolist()
    return kl / count, agreed / count, *(math.exp(-one / (count - len(texts))) for one in told)


def _log_probs(network: Network, ids: list[int]) -> torch.Tensor:
    """[n, V] behind each token."""
    given = torch.tensor([ids], device=network.device)
    positions = torch.arange(len(ids), device=network.device)[None]
    logits, _ = network.forward(given, positions, None, network.new_cache(1), len(ids))
    return logits[0].float().log_softmax(-1).cpu()
