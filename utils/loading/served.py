"""A pair whose target a server runs: nothing of it is loaded but, where drafts are made for it here, its tokenizer.

Knows no decoding and no screen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from utils.catalogue.specs import PairSpec
from utils.catalogue.templates import end_ids
from utils.errors import UserError
from utils.loading.build import load_tokenizer
from utils.loading.loaded import NO_LIMIT, LoadedModel, LoadedPair, LoadOptions
from utils.loading.loading import load_drafter
from utils.loading.quiet import quiet_environment
from utils.loading.sources import model_folder
from utils.progress import Progress
from utils.remote.pieces import Pieces, PieceTokenizer
from utils.remote.server import Server

ROUNDING = "the server's"  # the name of its number format


def load_served(spec: PairSpec, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]) -> LoadedPair:
    """The pair with its server at hand. UserError for a server that is absent or refuses."""
    target = spec.target
    server = Server(str(target.url), target.model, target.key_env)
    progress(f"asking {server.address}", None)
    name, tokenizer, size = server.chosen or target.name, PieceTokenizer(Pieces(0)), 0
    ends: frozenset[int] = frozenset()
    if target.tokenizer is not None:
        quiet_environment()
        tokenizer = _tokenizer(spec, options, progress, cancelled)
        size = max(tokenizer.get_vocab().values()) + 1
        own: Any = getattr(tokenizer, "eos_token_id", None)
        ends = end_ids(tokenizer) | (frozenset() if own is None else {own})
    pair = LoadedPair(
        spec=spec,
        target=_model(server, name, size),
        drafter=None,
        drafter_kind="none",
        tokenizer=tokenizer,
        stop_ids=ends,
        vocab_size=size,
        context=server.context or NO_LIMIT,
    )
    if target.tokenizer is None:
        return pair
    note = f"{server.address} scores every round's draft by a request: for looking, not for speed"
    found = load_drafter(pair, spec, options, progress, cancelled)
    return replace(found, notes=(note, *found.notes))


def _model(server: Server, name: str, vocab_size: int) -> LoadedModel:
    return LoadedModel(
        model=server,
        name=name,
        parameters=0,
        bytes=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantization=ROUNDING,
        context=server.context or NO_LIMIT,
        vocab_size=vocab_size,
        seconds=0.0,
    )


def _tokenizer(spec: PairSpec, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]) -> Any:
    source = spec.target.tokenizer
    assert source is not None
    tokenizer = load_tokenizer(model_folder(source, options, progress, cancelled, weights=False), options)
    if tokenizer is None:
        raise UserError(f"{source.name} has no tokenizer files: drafts for a server need its tokenizer")
    return tokenizer
