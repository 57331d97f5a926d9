"""One target's weights shared out over several processes, by transformers' tensor parallelism.

Every process loads its own part; which targets can be shared, and by how many, is told before anything is loaded.
Knows no decoding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from utils.catalogue.specs import ModelSpec
from utils.distributed.process_group import ProcessGroup
from utils.errors import UsageError
from utils.loading.build import load_model, load_tokenizer
from utils.loading.loaded import LoadedModel, LoadOptions
from utils.loading.sources import model_folder
from utils.progress import Progress


def load_shard(
    team: ProcessGroup, spec: ModelSpec, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[LoadedModel, Any | None]:
    """This rank's part of a target, and its tokenizer; every rank calls it. What fails on one is raised on all."""

    def ready() -> Any | None:
        check_shards(spec, folder, options, team.world.local_size)
        return load_tokenizer(folder, options)

    folder = team.in_turn(lambda: model_folder(spec, options, progress, cancelled))
    tokenizer = team.together(ready)
    cuda = options.device != "cpu" and torch.cuda.is_available()
    place = f"cuda:{team.world.local_rank}" if cuda else "cpu"
    loaded = team.together(lambda: load_model(spec, folder, options, place, "none", progress, cancelled))
    return loaded, tokenizer


def check_shards(spec: ModelSpec, folder: Path, options: LoadOptions, local_size: int) -> None:
    """UsageError, with the reason, if `options.tp_size` processes cannot share the target."""
    count, name = options.tp_size, spec.name
    if (kind := spec.quantization if options.quantization == "auto" else options.quantization) != "none":
        raise UsageError(
            f"{name}: quantization {kind} goes with one process, {count} share the target: use none, or one process"
        )
    _check_device(options.device, local_size)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=options.trust_remote_code)
    if config.is_encoder_decoder:
        raise UsageError(f"{name} is an encoder-decoder model, which processes cannot share: start one process")
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise UsageError(f"{name} cannot be shared: transformers has no tensor-parallel plan for {text.model_type}")
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % count or keys % count:
        common = math.gcd(heads, keys)
        counts = ", ".join(str(n) for n in range(2, common + 1) if common % n == 0)
        can = f"{counts} can" if counts else "it runs in one process"
        raise UsageError(
            f"{count} processes cannot share {name}: its {heads} attention heads and {keys} key/value heads "
            f"do not divide by {count} ({can})"
        )


def _check_device(device: str, local_size: int) -> None:
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device must be auto, cpu or cuda where processes share a target, got '{device}'")
    if device == "cuda" and not have:
        raise UsageError("device 'cuda' is not there: this machine has cpu")
    if device != "cpu" and 0 < have < local_size:
        raise UsageError(f"{local_size} processes on a machine with {have} GPUs: one GPU each, or --device cpu")


def share_cores(local_size: int) -> None:
    """Each process of a machine takes its part of the cores, unless OMP_NUM_THREADS says how many."""
    if not os.environ.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_size))
