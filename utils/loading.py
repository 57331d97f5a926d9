"""A pair's specification → models in memory, from the hub, a folder, a GGUF or a package file.

The one place that builds models. Says in one line what cannot be loaded and why; knows no decoding
and no screen. Importing it is cheap: torch and transformers come in with the first load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.catalogue import BEHIND, MODELLESS, STUDENTS, ModelSpec, PairSpec, named_tables, spec_from_argument
from utils.errors import UsageError, UserError
from utils.fit import check_fit, fit_notes, shared_vocabulary
from utils.progress import Cancelled, Progress, check, never, silent
from utils.quiet import quiet_environment, quiet_libraries
from utils.sources import mended_folder, model_folder
from utils.specs import TRAINED_METHODS, trained_kind
from utils.students import student_kind

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
    """A target, what drafts for it, and what both share. `notes` are lines worth showing once.

    Of a trained drafter (see STUDENTS) only the folder is known here: what decodes builds it.
    """

    spec: PairSpec
    target: LoadedModel
    drafter: LoadedModel | None
    drafter_kind: str  # "model", or the word of a drafter that is none
    tokenizer: Any
    stop_ids: frozenset[int]
    vocab_size: int
    context: int
    notes: tuple[str, ...] = ()
    student: Path | None = None  # the trained drafter's folder


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
    """The same target with another drafter: "ngram", "tables", "tables:FILE", "none", one of the pair's
    trained ones ("plain", "glide", "feature"), or a model.

    A model is a hub id, a folder or a GGUF file; a folder may hold a trained drafter.

    Raises as :func:`load_pair`; `pair` itself stays usable whatever happens.
    """
    changes: dict[str, Any] = {"method": "spec"}  # the pair's method spoke of the pair's drafter
    if (file := named_tables(drafter)) is not None:
        drafter, changes["tables"] = "tables", file
    pair = replace(pair, spec=pair.spec.model_copy(update=changes))
    wanted: ModelSpec | str = drafter if drafter in (*MODELLESS, *STUDENTS, *BEHIND) else spec_from_argument(drafter)
    return _with_drafter(pair, wanted, options, progress, cancelled)


def _with_drafter(
    pair: LoadedPair,
    drafter: ModelSpec | str,
    options: LoadOptions,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> LoadedPair:
    pair = replace(pair, spec=pair.spec.model_copy(update={"drafter": drafter}))
    if isinstance(drafter, str):
        if (kind := trained_kind(drafter)) is not None:
            folder = getattr(pair.spec.students, kind)
            return _with_student(pair, drafter, Path(folder) if folder else pair.spec.student(kind), options)
        if drafter not in MODELLESS:
            raise UsageError(
                f"drafter must be {', '.join((*MODELLESS, *STUDENTS, *BEHIND))} or a model, got '{drafter}'"
            )
        return replace(
            _alone(pair, drafter),
            notes=(NO_TABLES,) if drafter == "tables" and pair.spec.tables is None else (),
        )
    options = replace(options, revision=None)  # the flag speaks of the target's repository
    folder = model_folder(drafter, options, progress, cancelled)
    kind, method = student_kind(folder), pair.spec.method
    if method in TRAINED_METHODS and kind != method:
        raise UserError(f"{drafter.name} is no {method} drafter: {folder / 'config.json'} does not describe one")
    if kind is not None:
        return _with_student(pair, kind, folder, options)
    device = options.drafter_device or options.device
    quantization = options.drafter_quantization
    loaded, tokenizer = _load(drafter, options, device, quantization, progress, cancelled, folder)
    tokenizers = (pair.tokenizer, tokenizer)
    if problems := check_fit(pair.target, loaded, tokenizers):
        raise UserError(f"{loaded.name} cannot draft for {pair.target.name}: {problems[0]}")
    return replace(
        pair,
        drafter=loaded,
        drafter_kind="model",
        student=None,
        vocab_size=shared_vocabulary(pair.target, loaded),
        context=min(pair.target.context, loaded.context),
        notes=tuple(fit_notes(pair.target, loaded, tokenizers)),
    )


def _alone(pair: LoadedPair, kind: str) -> LoadedPair:
    """The pair with no second model: what drafts has the target's vocabulary and needs no context of its own."""
    target = pair.target
    return replace(
        pair,
        drafter=None,
        drafter_kind=kind,
        student=None,
        vocab_size=target.vocab_size,
        context=target.context,
        notes=(),
    )


def _with_student(pair: LoadedPair, kind: str, folder: Path, options: LoadOptions) -> LoadedPair:
    notes = []
    if options.drafter_device not in (None, options.device):
        notes.append(
            f"a trained drafter runs where its target does: --drafter-device {options.drafter_device} is unused"
        )
    if options.drafter_quantization != "none":
        notes.append(
            f"a trained drafter is not quantized: --drafter-quantization {options.drafter_quantization} is unused"
        )
    return replace(_alone(pair, kind), student=folder, notes=tuple(notes))


def _load(
    spec: ModelSpec,
    options: LoadOptions,
    device: str,
    quantization: str,
    progress: Progress,
    cancelled: Callable[[], bool],
    folder: Path | None = None,
) -> tuple[LoadedModel, Any | None]:
    """One model and its tokenizer (None without tokenizer files); a damaged conversion is made again, once.

    `folder` is where it lies, if that is known.
    """
    from utils.building import load_model, load_tokenizer

    def build(folder: Path) -> tuple[LoadedModel, Any | None]:
        tokenizer = load_tokenizer(folder, options)
        check(cancelled)
        loaded = load_model(spec, folder, options, device, quantization, progress, cancelled)
        check(cancelled)
        return loaded, tokenizer

    if folder is None:
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
