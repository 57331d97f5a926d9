"""`pairs` and `check`: list the pairs of the catalogue; say whether a pair fits, how fast it is on this machine, and by
which command another program serves it.

Prints tables to stdout. Knows no decoding; the catalogue is listed without loading a model.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from app.lanes.pairing import catalogue, choose_pair, drafter_words, load_options
from app.measure.elsewhere import PUBLISHED, Recipe, title_of, written
from app.screen.output import load_progress, screen
from app.screen.terminal import Interrupts
from app.screen.view import kernels_of
from app.settings.table import ModelOptions, Settings
from sampling.drafters.registry import ROWS
from utils.catalogue.specs import CASCADES, ModelSpec, PairSpec, head_kind_of, is_gguf
from utils.catalogue.templates import AUTO, PLAIN, carries_template
from utils.errors import UsageError, UserError, holding
from utils.gguf.header import TOKENS, GgufHeader, read_header
from utils.loading.loaded import LoadedModel, LoadedPair, LoadOptions, limit_text
from utils.objects import HfConfig

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


_HEAD = "a head made for this very target would (infer.py distill makes one), or any causal model with its tokenizer"
_WIDE = 200  # columns for a table that goes into a file or a pipe
_ELSEWHERE = "to be fetched"
_WOULD = {  # by words of an error: the end of its line, which names a drafter that would fit
    "hidden size": _HEAD,
    "is for a vocabulary": _HEAD,
    "this target is": _HEAD,
    "another target": _HEAD,
    "no tokenizer files": "with its tokenizer's files beside its weights its drafts would be translated",
    "encoder-decoder": "a drafter of the target's own kind would",
}


def list_pairs(settings: Settings, options: ModelOptions, own: None) -> int:
    """Print the catalogue as a table; return 0. Raises UsageError if it is wrong."""
    known = catalogue(options)
    table = _table("pair", "target", "drafter", "method", "state", "notes")
    for pair in known.pairs.values():
        default = pair.name == known.default
        name = Text(pair.name + " (default)" * default, style="bold" if default else "")
        between = {"cascade": " < ", "chain": " + "}.get(pair.drafter_name)  # large to small, or in their order
        drafter = between.join(pair.cascade_names) if between else pair.drafter_name
        table.add_row(name, pair.target.name, drafter, pair.method, _state(pair), pair.notes)
    screen(settings, sys.stdout, _WIDE).print(table)
    return 0


def check_pair(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Load the pair and print its parts and that they fit; return 0. `args`: :func:`app.measure.elsewhere.check_args`.

    A draft head in a GGUF file is described alone, without loading a model. For a pair that is not on disk --for prints
    the command that follows from the catalogue, and fetches nothing. --speed also prints the time of passes over 1 … 16
    tokens and the cost of drafting; --plan prints its table instead. Raises UserError (exit code 1) with the reason if
    the pair cannot be loaded or does not fit, its own tables or draft head included.
    """
    from app.measure.plan import forecast, run_plan, speed_table

    console = screen(settings, sys.stdout, _WIDE)
    say = partial(console.print, soft_wrap=True)
    file = Path(os.path.expanduser(options.pair or options.target or ""))
    if options.drafter is None and is_gguf(file) and (header := read_header(file)).head:
        say("\n".join(head_lines(header)))
        return 0
    by_word = args.forecast and options.pair is None
    if by_word and options.target in catalogue(options).pairs and not os.path.exists(str(options.target)):
        options = options.model_copy(update={"pair": options.target, "target": None})
    if args.plan:
        return run_plan(settings, options, args)
    spec, given = choose_pair(options), load_options(options)
    if args.program is not None and _state(spec) == _ELSEWHERE:
        say(written(args.program, _unread(spec, settings)))
        return 0
    engine = _fitting(spec, given, settings, suggests=args.forecast)
    loaded = engine.loaded
    console.print(_models(loaded))
    notes = (f"note: {note}" for note in loaded.notes)
    for line in [*_shared(loaded), *_wide_passes(engine), *_translated(engine), *notes]:
        say(line)
    if args.speed:
        console.print(speed_table(engine, settings))
    if args.forecast:
        with Interrupts() as interrupted:
            brings = forecast(engine, settings, interrupted)
        say("\n".join(brings.lines()) if brings else "nothing drafts: the speed is plain decoding's")
        if args.program is not None:
            say()
            say(written(args.program, _recipe(engine, settings, given, brings.gamma if brings else 0)))
    return 0


def _fitting(spec: PairSpec, given: LoadOptions, settings: Settings, suggests: bool) -> PairEngine:
    """Load the pair. With `suggests` a UserError that says why it does not fit also names a drafter that would."""
    from app.lanes.lane import PairEngine
    from utils.loading.loading import load_pair

    with Interrupts() as stop, load_progress(sys.stderr, quiet=settings.quiet, cancelled=stop) as progress:
        try:
            with drafter_words(spec):
                return PairEngine(load_pair(spec, given, progress))
        except UserError as error:
            would = next((would for words, would in _WOULD.items() if words in str(error)), "")
            if not (would and suggests) or isinstance(error, UsageError):
                raise
            raise UserError(f"{error}; {would}") from None


def head_lines(header: GgufHeader) -> list[str]:
    """Return lines that say which kind of draft head a GGUF file holds, for which target, and how it is used."""
    file, shapes = header.parts[0], {info.name: info.shape for info in header.tensors}
    layers = header.get("target_layers") or header.get("extract_layers") or []
    width = header.get("embedding_length_out") or header.get("target_hidden_size") or header.get("embedding_length", 0)
    if (fc := shapes.get("fc.weight")) and layers:
        width = fc[1] // len(layers)
    ids = len(header.metadata.get(TOKENS, ())) or header.get("vocab_size", 0)
    made_for = header.metadata.get("general.base_model.0.name")
    title = ROWS[header.head].title if header.head in ROWS else "Gemma 4 assistant"
    bits, _ = Counter(info.kind for info in header.tensors if len(info.shape) > 1).most_common(1)[0]
    reads = f"; it reads what enters layers {', '.join(map(str, layers))}" if layers else ""
    return [
        f"{file.name}: {title} ({header.architecture}, mostly {bits})",
        f"for a target of hidden size {width:,} and {ids:,} ids{f' ({made_for})' if made_for else ''}{reads}",
        *([f"it drafts {shapes['d2t'][0]:,} of these ids"] if "d2t" in shapes else []),
        f"with its target: infer.py --target MODEL --drafter {file}",
    ]


def _recipe(engine: PairEngine, settings: Settings, given: LoadOptions, gamma: int) -> Recipe:
    """Return the facts of the pair on which its command for another program depends."""
    from sampling.drafters.draft_heads.assistant import AssistantLM
    from sampling.drafters.draft_heads.checkpoint import load_student, read_config
    from sampling.drafters.draft_heads.dflash import PardLM

    loaded, spec, word = engine.loaded, engine.loaded.spec, engine.loaded.drafter_word
    if word == "eagle" and "student" not in read_config(engine.drafters.folder(word)):
        head = load_student(engine.drafters.folder(word), loaded.target.model, engine.drafters.tokenizer_fingerprint)
        word = "eagle3" if head.config.wide else "eagle1"
    if isinstance(engine.drafters.model, PardLM):
        word = "pard"
    if isinstance(engine.drafters.model, AssistantLM):
        word = "assistant"
    weights = loaded.target.dtype_text if loaded.target.quantization == "none" else "4- to 8-bit"
    return Recipe(
        _source(spec.target, given),
        word,
        gamma,
        "" if isinstance(spec.drafter, str) else _source(spec.drafter, given),
        translated=any(model.vocabulary is not None for model in loaded.drafting_models),
        compiled=f"{weights} weights" if engine.invariant else "",
        encodes=loaded.target.encodes,
        lookup=settings.ngram_n,
        template=_template(spec) if carries_template(loaded.tokenizer, spec.template or AUTO) else "",
    )


def _template(spec: PairSpec) -> str:
    return "" if spec.template == PLAIN or spec.arch == "seq2seq" else spec.template or AUTO


def _unread(spec: PairSpec, settings: Settings) -> Recipe:
    """Return the facts of a pair that the catalogue alone gives."""
    drafter, word = "", str(spec.drafter)
    notes = [f"{spec.name} is not on disk: nothing was read or measured (infer.py check {spec.name} fetches it)"]
    if not isinstance(spec.drafter, str):
        drafter = spec.drafter.file or spec.drafter.source
        kinds = (kind for kind in PUBLISHED if kind.rstrip("1") in drafter.lower())
        word = (
            max(kinds, key=lambda kind: len(kind.rstrip("1")), default="model") if spec.method != "glide" else "glide"
        )
        taken = "a model with the target's vocabulary" if word == "model" else f"one of the {title_of(word)}"
        notes.append(f"{drafter} is taken for {taken}")
    sources = [model for model in (spec.target, spec.drafter) if not isinstance(model, str) and model.file]
    notes += [f"{model.file} comes from {model.repository or model.package}" for model in sources]
    return Recipe(
        spec.target.file or spec.target.source,
        word,
        settings.gamma if isinstance(settings.gamma, int) else 4,
        drafter,
        settings.ngram_n,
        encodes=spec.arch == "seq2seq",
        template=_template(spec),
        notes=tuple(notes),
    )


def _source(model: ModelSpec, given: LoadOptions) -> str:
    """Return the id, folder or file by which another program loads the model."""
    from utils.loading.sources import gguf_file

    return str(gguf_file(model, given)) if model.of_gguf else model.source


def _table(*columns: str) -> Table:
    return Table(
        *(Column(column, overflow="fold") for column in columns),
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )


def _state(pair: PairSpec) -> str:
    """Return in words whether the pair can be loaded now or must be fetched, or which folder is missing. Uses no
    network."""
    from utils.loading.sources import is_here

    models, kinds = [pair.target], [pair.drafter]
    if pair.drafter in CASCADES:
        models, kinds = [*models, *pair.cascade_models], [*pair.cascade_names]
    elif not isinstance(pair.drafter, str):
        models.append(pair.drafter)
    folders = (pair.students[kind] for kind in map(head_kind_of, kinds) if kind)
    if (missing := next((folder for folder in folders if not Path(folder).exists()), None)) is not None:
        return f"needs {missing}"
    return "ready" if all(map(is_here, models)) else _ELSEWHERE


def _models(loaded: LoadedPair) -> Table:
    specs = {spec.name: spec for spec in loaded.spec.cascade_models}
    models: dict[str, tuple[LoadedModel, Any]] = {
        "target": (loaded.target, loaded.spec.target),
        **({} if loaded.drafter is None else {"drafter": (loaded.drafter, loaded.spec.drafter)}),
        **{
            f"drafter {number}": (loaded.cascade_models[name], specs[name])
            for number, name in enumerate(loaded.spec.cascade_names, start=1)
            if name in loaded.cascade_models
        },
    }
    table = _table(loaded.spec.name, *models)
    properties = [
        {
            "model": model.name,
            "source": spec.source,
            "parameters": f"{model.parameters:,}",
            "memory": f"{model.bytes / 1e6:,.0f} MB",
            "stored as": model.stored.removeprefix("torch."),
            "converted": ", ".join(model.converts) or "no",
            "dtype": model.dtype_text,
            "quantization": model.quantization,
            "kernels": kernels_of(model),
            "device": str(model.device),
            "context": limit_text(model.context),
            "vocabulary": f"{model.vocab_size:,} ids",
            "loaded in": f"{model.seconds:.1f} s",
        }
        for model, spec in models.values()
    ]
    for name in properties[0]:
        table.add_row(name, *(values[name] for values in properties))
    return table


def _shared(loaded: LoadedPair) -> list[str]:
    drafter, tokenizer, models = loaded.drafter_word, loaded.tokenizer, loaded.drafting_models
    if loaded.drafter is not None:
        drafter = loaded.drafter.name
    elif drafter in ("cascade", "chain"):
        drafter += f" of {', '.join(loaded.spec.cascade_names)}"
    template = "yes" if tokenizer.chat_template else "none, prompts are completed as they are"
    if loaded.target.encodes:
        template = "none, the encoder reads each prompt as it is"
    stops = ", ".join(f"{tokenizer.decode([i])} ({i})" for i in sorted(loaded.stop_ids))
    fits = f"{loaded.drafter_word} drafts in the target's own vocabulary"
    if any(model.vocabulary is not None for model in models):
        fits = "the drafts of another vocabulary are translated"
    elif models:
        every = "both models" if len(models) == 1 else f"all {len(models) + 1} models"
        fits = f"{min([loaded.vocab_size, *(model.vocab_size for model in models)]):,} ids mean the same in {every}"
    return [
        f"drafter: {drafter}",
        f"tokenizer: {len(tokenizer.get_vocab()):,} tokens, chat template: {template}",
        f"stops at: {stops or 'nothing, answers end at their length'}",
        f"context of the pair: {limit_text(loaded.context)}",
        f"the pair fits: {fits}",
    ]


def _wide_passes(engine: PairEngine) -> list[str]:
    """Return sentences that say why a pass of this target over several tokens costs more than in other models."""
    network: Any = engine.target.network
    config: HfConfig = getattr(engine.loaded.target.model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    # The number of experts under the names that configurations have for it:
    experts = max(getattr(text, name, None) or 0 for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    singly = getattr(getattr(network, "exact", None), "singly", False)
    return holding(
        {
            "recurrent layers read one token at a time: a pass over drafts costs as many, so they cannot pay": singly,
            "recurrent layers read twice in a pass with drafts: v(n) is higher than of attention alone": (
                not singly and getattr(network, "recurrent", False)
            ),
            f"a mixture of {experts} experts: more tokens in a pass read more of them, so v(n), measured with "
            "different tokens, grows": experts > 1,
        }
    )


def _translated(engine: PairEngine) -> list[str]:
    """Return, for each drafter with another vocabulary, how much of it is shared, how it drafts, and what translating
    costs."""
    lines = []
    for name, model in {"drafter": engine.loaded.drafter, **engine.loaded.cascade_models}.items():
        if model is None or model.vocabulary is None:
            continue
        by = engine.drafters.lm(name).translation
        shared, size = len(by.ours), engine.loaded.vocab_size
        drafts = "text, which is spelled in the target's tokens" if by.by_text else "shared tokens"
        lines += [
            f"{model.name} shares {shared:,} of the target's {size:,} tokens ({shared / size:.0%}); of a sample's "
            f"{by.tokens:,} tokens {by.own:.0%} are its own there, and it spells {by.spelled:.0%} of the text with "
            f"{by.ratio:.2f} tokens for one of the target's",
            f"{model.name} drafts {drafts}; translating costs {1000 * by.seconds:.2f} ms a token",
        ]
    return lines
