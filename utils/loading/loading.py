"""A pair's specification → models in memory, from the hub, a folder, a GGUF or a package file, or in a server.

Errors are one line. Importing it is cheap but for torch: transformers is imported with the first load, if at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from utils.catalogue.catalogue import head_kind, ships_mtp
from utils.catalogue.specs import (
    CASCADES,
    TRAINED_METHODS,
    ModelSpec,
    PairSpec,
    head_kind_of,
)
from utils.catalogue.templates import end_ids
from utils.device_map import spread_note
from utils.errors import UserError, holding, raise_first
from utils.files import read_object
from utils.gguf.header import read_header
from utils.loading.build import load_model, load_tokenizer, stop_ids
from utils.loading.fit import check_fit, fit_notes, other_vocabulary, spoken_ids
from utils.loading.loaded import NO_LIMIT, UNSAID, LoadedModel, LoadedPair, LoadOptions
from utils.loading.quiet import quiet_environment
from utils.loading.sources import head_folder, model_folder
from utils.objects import HfTokenizer
from utils.processes import join
from utils.progress import SILENT, Progress
from utils.remote.pieces import Pieces, PieceTokenizer
from utils.remote.server import server_at

ROUNDING = "the server's"  # the number format of a target that a server runs
NO_TABLES = (
    "this pair has no n-gram tables: drafts come from the conversation alone (distill --stage tables builds some)"
)


def load_pair(
    spec: PairSpec,
    options: LoadOptions,
    progress: Progress = SILENT,
) -> LoadedPair:
    """Load the models of a pair and check that they fit: the target and its drafter, or those of its cascade.

    Raises UserError (one line) if something cannot be loaded or does not fit, Cancelled when stopped.
    """
    quiet_environment()
    progress("starting the model libraries")
    if options.tp_size > 1:
        options = replace(options, device=join(options.device))
    target, tokenizer = _load(spec.target, options, options.device, options.quantization, progress)
    raise_first(
        {
            f"{spec.target.name} has no tokenizer files: a target needs them": tokenizer is None,
            f"pair '{spec.name}' says arch: seq2seq, but {target.name} is no encoder-decoder model": (
                spec.arch == "seq2seq" and not target.encodes
            ),
        },
        UserError,
    )
    pair = LoadedPair(
        spec=spec,
        target=target,
        drafter=None,
        drafter_word="none",
        tokenizer=tokenizer,
        stop_ids=stop_ids(target.model, tokenizer),
        vocab_size=spoken_ids(target, tokenizer),
        context=target.context,
    )
    complete = load_drafter(pair, spec, options, progress)
    notes = [*expanded(spec.target, options, target), spread_note(target.name, target.model), *own_head(target)]
    return replace(complete, notes=(*filter(None, notes), *complete.notes))


def own_head(target: LoadedModel) -> list[str]:
    """One line on which head is used where a folder contradicts itself; [] otherwise."""
    line = f"{target.name} has a separate head, though config.json ties it to the embedding: the file's head is used"
    return [line] if target.own_head else []


def expanded(spec: ModelSpec, options: LoadOptions, target: LoadedModel) -> list[str]:
    """One line on why `auto` expanded a GGUF file, or why torch runs another model on the CPU; [] otherwise."""
    if not spec.of_gguf and target.expanded and not options.attn_implementation:
        return [f"{target.name} runs in torch: {target.expanded}"]
    if options.quantization != "auto" or target.quantization != "none" or not spec.of_gguf:
        return []
    whys = holding(
        {
            f"{options.tp_size} processes share them": options.tp_size > 1,
            f"there are no kernels for {target.device.type}": target.device.type != "cpu",
            f"the kernels compute in float32, not in {target.dtype_text}": target.dtype_text != "float32",
            "--attn-implementation asks for transformers' own pass": options.attn_implementation is not None,
        }
    )
    return [f"the weights of {target.name} are expanded to {target.dtype_text} ({[*whys, target.expanded][0]})"]


def load_drafter(
    pair: LoadedPair,
    spec: PairSpec,
    options: LoadOptions,
    progress: Progress = SILENT,
) -> LoadedPair:
    """Return the same target with the drafter that `spec` names.

    UserError as :func:`load_pair`, and for a drafter of another method; `pair` itself stays usable.
    """
    pair, drafter = replace(pair, spec=spec), spec.drafter
    options = replace(options, revision=None, tp_size=1)  # one process; the revision is the target's
    if isinstance(drafter, str):
        if (kind := head_kind_of(drafter)) is not None:
            folders = pair.spec.students
            folder = Path(folders[kind]) if kind in folders else pair.spec.head_folder(kind)
            return _with_head(pair, drafter, head_folder(folder, progress), options)
        if drafter in CASCADES:
            return _with_cascade(pair, drafter, options, progress)
        return _beside(pair, drafter, notes=(NO_TABLES,) if drafter == "tables" and pair.spec.tables is None else ())
    folder = model_folder(drafter, options, progress, weights=options.drafter_quantization != "auto")
    kind, method = head_kind(folder), pair.spec.method
    if method in TRAINED_METHODS and kind != method:
        raise UserError(f"{drafter.name} is no {method} drafter: {folder / 'config.json'} does not describe one")
    if kind is not None:
        return _with_head(pair, kind, folder, options)
    _check_whole(pair, drafter, folder)
    loaded, notes = _fitting(pair, drafter, folder, options, progress)
    return _beside(pair, "model", drafter=loaded, notes=notes)


def _check_whole(pair: LoadedPair, drafter: ModelSpec, folder: Path) -> None:
    """Raise UserError for a drafter that is the target's whole model, with layers for multi-token prediction."""
    if not (read_header(Path(drafter.gguf)).get("nextn_predict_layers") if drafter.gguf else ships_mtp(folder)):
        return
    config, large = read_object(folder / "config.json"), pair.target.model.config.get_text_config()
    own = config.get("text_config") or config
    if all(own.get(size) == getattr(large, size, None) for size in ("hidden_size", "num_hidden_layers")):
        raise UserError(
            f"{drafter.name} is a whole model with a next-token layer, no head of a model: "
            f"--target {drafter.source} --drafter mtp drafts with that layer"
        )


def _with_cascade(pair: LoadedPair, word: str, options: LoadOptions, progress: Progress) -> LoadedPair:
    """Return the pair with the models of its cascade in memory; the lane builds the other drafters in it."""
    models: dict[str, LoadedModel] = {}
    notes: list[str] = []
    for spec in pair.spec.cascade_models:
        folder = model_folder(spec, options, progress, weights=options.drafter_quantization != "auto")
        if (kind := head_kind(folder)) is not None:
            raise UserError(
                f"{spec.name} is a trained {kind} drafter: name its folder in the pair's students, and {kind} in the "
                "cascade"
            )
        models[spec.name], more = _fitting(pair, spec, folder, options, progress)
        notes += more
    least = min([pair.target.context, *(model.context for model in models.values() if model.vocabulary is None)])
    notes = [note for note in notes if "the pair runs with" not in note or note.endswith(f" {least}")]
    return _beside(pair, word, cascade_models=models, notes=notes)


def _fitting(
    pair: LoadedPair,
    spec: ModelSpec,
    folder: Path,
    options: LoadOptions,
    progress: Progress,
) -> tuple[LoadedModel, list[str]]:
    """Return a model that can draft for the pair's target, and notes on it; UserError for one that cannot."""
    loaded, tokenizer = _load(
        spec, options, options.drafter_device or options.device, options.drafter_quantization, progress, folder
    )
    if loaded.encodes != pair.target.encodes:
        encoding, other = (loaded, pair.target) if loaded.encodes else (pair.target, loaded)
        raise UserError(
            f"{loaded.name} cannot draft for {pair.target.name}: {encoding.name} is an encoder-decoder model, "
            f"{other.name} is none"
        )
    tokenizers = (pair.tokenizer, tokenizer)
    if problems := check_fit(pair.target, loaded, tokenizers):
        vocabulary = None if loaded.encodes else other_vocabulary(tokenizers)
        if vocabulary is None:
            raise UserError(f"{loaded.name} cannot draft for {pair.target.name}: {problems[0]}")
        return replace(loaded, vocabulary=vocabulary), [
            f"{loaded.name} has other tokens than {pair.target.name}: drafts are translated (see infer.py check)"
        ]
    return loaded, fit_notes(pair.target, loaded, tokenizers)


def _beside(
    pair: LoadedPair,
    word: str,
    *,
    notes: Sequence[str],
    drafter: LoadedModel | None = None,
    cascade_models: Mapping[str, LoadedModel] = MappingProxyType({}),
    draft_head: Path | None = None,
) -> LoadedPair:
    """Return the pair with its drafter, and the shortest context of the models that have the target's vocabulary."""
    complete = replace(
        pair,
        drafter_word=word,
        draft_head=draft_head,
        notes=tuple(notes),
        drafter=drafter,
        cascade_models=cascade_models,
    )
    bounds = [model.context for model in complete.drafting_models if model.vocabulary is None]
    return replace(complete, context=min([pair.target.context, *bounds]))


def _with_head(pair: LoadedPair, kind: str, folder: Path, options: LoadOptions) -> LoadedPair:
    if pair.target.encodes:
        raise UserError(
            f"drafter {kind}: {pair.target.name} is an encoder-decoder model, which has no trained drafters"
        )
    device, quantization = options.drafter_device, options.drafter_quantization
    notes = holding(
        {
            f"a trained drafter runs where its target does: --drafter-device {device} is unused": device
            not in (None, options.device),
            f"a trained drafter is not quantized: --drafter-quantization {quantization} is unused": quantization
            not in UNSAID,
        }
    )
    return _beside(pair, kind, draft_head=folder, notes=notes)


def _load(
    spec: ModelSpec,
    options: LoadOptions,
    device: str,
    quantization: str,
    progress: Progress,
    folder: Path | None = None,
) -> tuple[LoadedModel, HfTokenizer | None]:
    """Return one model and its tokenizer (None without tokenizer files). `folder`: the model's, if it is known."""
    if folder is None:
        folder = model_folder(spec, options, progress, weights=quantization != "auto")
    if spec.of_gguf and (kind := head_kind(folder)) is not None:
        raise UserError(
            f"{spec.name} is a {kind} head, no model: --target MODEL --drafter {spec.source} drafts with it"
        )
    tokenizer = load_tokenizer(folder, options)
    return load_model(spec, folder, options, device, quantization, progress), tokenizer


# -- a target that a server runs: nothing of it is loaded but, where drafts are made here, its tokenizer ------------


def load_served(spec: PairSpec, options: LoadOptions, progress: Progress) -> LoadedPair:
    """Return a pair whose target is a server. UserError for a server that is absent or refuses."""
    target, ends, tokenizer, size = spec.target, frozenset[int](), None, 0
    server = server_at(str(target.url), target.model, target.key_env)
    progress(f"asking {server.address}")
    name, context = server.chosen or target.name, server.context or NO_LIMIT
    if target.tokenizer is not None:
        quiet_environment()
        folder = model_folder(target.tokenizer, options, progress, weights=False, tokenizer_only=True)
        if (tokenizer := load_tokenizer(folder, options)) is None:
            raise UserError(f"{target.tokenizer.name} has no tokenizer files: drafts for a server need its tokenizer")
        size = max(tokenizer.get_vocab().values()) + 1
        ends = end_ids(tokenizer) | ({tokenizer.eos_token_id} - {None})
    pair = LoadedPair(
        spec=spec,
        target=LoadedModel(
            model=server,
            name=name,
            device=torch.device("cpu"),
            dtype=torch.float32,
            quantization=ROUNDING,
            context=context,
            vocab_size=size,
        ),
        drafter=None,
        drafter_word="none",
        tokenizer=tokenizer or PieceTokenizer(Pieces(0)),
        stop_ids=ends,
        vocab_size=size,
        context=context,
    )
    if target.tokenizer is None:
        return pair
    complete = load_drafter(pair, spec, options, progress)
    return replace(
        complete,
        notes=(
            f"{server.address} scores every round's draft by a request: for looking, not for speed",
            *complete.notes,
        ),
    )
