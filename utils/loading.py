"""A pair's specification → models in memory, from the hub, a folder, a GGUF or a package file.

The one place that builds models. Says in one line what cannot be loaded and why; knows no decoding
and no screen. Importing it is cheap: torch and transformers come in with the first load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.catalogue import MODELLESS, ModelSpec, PairSpec, named_tables, spec_from_argument
from utils.errors import UsageError, UserError
from utils.fit import check_fit, fit_notes, shared_vocabulary
from utils.progress import Cancelled, Progress, check, never, silent
from utils.quiet import quiet_environment, quiet_libraries
from utils.sources import mended_folder, model_folder

if TYPE_CHECKING:
    import torch

__all__ = ["Cancelled", "LoadOptions", "LoadedModel", "LoadedPair", "Progress", "load_drafter", "load_pair"]


NO_TABLES = "this pair has no n-gram tables: drafts come from the conversation alone (infer.py tables builds some)"


@dataclass(frozen=True)
class LoadOptions:
    """What the command line says about loading; it outranks the catalogue where it is not a default."""

    device: str = "auto"
    drafter_device: str | None = None
    dtype: str = "auto"
    quantization: str = "none"
    drafter_quantization: str = "none"
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `bytes` are really held, `parameters` as designed, `seconds` to load it."""

    model: Any
    name: str
    parameters: int
    bytes: int
    device: torch.device
    dtype: torch.dtype
    quantization: str
    context: int
    vocab_size: int  # the number of logits, padding included
    seconds: float


@dataclass(frozen=True)
class LoadedPair:
    """A target, what drafts for it, and what both share. `notes` are lines worth showing once."""

    spec: PairSpec
    target: LoadedModel
    drafter: LoadedModel | None
    drafter_kind: str  # "model" | "ngram" | "tables" | "none"
    tokenizer: Any
    stop_ids: frozenset[int]
    vocab_size: int
    context: int
    notes: tuple[str, ...] = ()


def load_pair(
    spec: PairSpec,
    options: LoadOptions,
    progress: Progress = silent,
    cancelled: Callable[[], bool] = never,
) -> LoadedPair:
    """Load both models of a pair and check that they fit.

    Raises UserError (one line) if something cannot be loaded or does not fit, Cancelled when stopped.
    """
    if spec.lacking is not None:
        raise UserError(f"pair '{spec.name}' needs {spec.lacking}, which this version does not have")
    quiet_environment()
    progress("starting the model libraries", None)
    quiet_libraries()
    check(cancelled)
    target, tokenizer = _load(spec.target, options, options.device, options.quantization, progress, cancelled)
    if tokenizer is None:
        raise UserError(f"{spec.target.name} has no tokenizer files: a target needs them")
    from utils.building import stop_ids

    pair = LoadedPair(
        spec=spec.model_copy(update={"drafter": "none"}),
        target=target,
        drafter=None,
        drafter_kind="none",
        tokenizer=tokenizer,
        stop_ids=stop_ids(target.model, tokenizer),
        vocab_size=target.vocab_size,
        context=target.context,
    )
    return _with_drafter(pair, spec.drafter, options, progress, cancelled)


def load_drafter(
    pair: LoadedPair,
    drafter: str,
    options: LoadOptions,
    progress: Progress = silent,
    cancelled: Callable[[], bool] = never,
) -> LoadedPair:
    """The same target with another drafter: "ngram", "tables", "tables:FILE", "none", or a model.

    A model is a hub id, a folder or a GGUF file.

    Raises as :func:`load_pair`; `pair` itself stays usable whatever happens.
    """
    if (file := named_tables(drafter)) is not None:
        drafter, pair = "tables", replace(pair, spec=pair.spec.model_copy(update={"tables": file}))
    wanted: ModelSpec | str = drafter if drafter in MODELLESS else spec_from_argument(drafter)
    return _with_drafter(pair, wanted, options, progress, cancelled)


def _with_drafter(
    pair: LoadedPair,
    drafter: ModelSpec | str,
    options: LoadOptions,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> LoadedPair:
    spec = pair.spec.model_copy(update={"drafter": drafter})
    if isinstance(drafter, str):
        if drafter not in MODELLESS:
            raise UsageError(f"drafter must be {', '.join(MODELLESS)} or a model, got '{drafter}'")
        target = pair.target
        return replace(
            pair,
            spec=spec,
            drafter=None,
            drafter_kind=drafter,
            vocab_size=target.vocab_size,
            context=target.context,
            notes=(NO_TABLES,) if drafter == "tables" and spec.tables is None else (),
        )
    options = replace(options, revision=None)  # the flag speaks of the target's repository
    device = options.drafter_device or options.device
    loaded, tokenizer = _load(drafter, options, device, options.drafter_quantization, progress, cancelled)
    tokenizers = (pair.tokenizer, tokenizer)
    if problems := check_fit(pair.target, loaded, tokenizers):
        raise UserError(f"{loaded.name} cannot draft for {pair.target.name}: {problems[0]}")
    return replace(
        pair,
        spec=spec,
        drafter=loaded,
        drafter_kind="model",
        vocab_size=shared_vocabulary(pair.target, loaded),
        context=min(pair.target.context, loaded.context),
        notes=tuple(fit_notes(pair.target, loaded, tokenizers)),
    )


def _load(
    spec: ModelSpec,
    options: LoadOptions,
    device: str,
    quantization: str,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> tuple[LoadedModel, Any | None]:
    """One model and its tokenizer (None without tokenizer files); a damaged conversion is made again, once."""
    from utils.building import load_model, load_tokenizer

    def build(folder: Path) -> tuple[LoadedModel, Any | None]:
        tokenizer = load_tokenizer(folder, options)
        check(cancelled)
        loaded = load_model(spec, folder, options, device, quantization, progress, cancelled)
        check(cancelled)
        return loaded, tokenizer

    folder = model_folder(spec, options, progress, cancelled)
    try:
        return build(folder)
    except UserError as error:
        if isinstance(error, UsageError | Cancelled):
            raise
        again = mended_folder(spec, options, folder, progress, cancelled)
        if again is None:
            raise
    return build(again)
