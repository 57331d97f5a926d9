"""Loads a recorded target (its answers in a file) and the drafters to try against it.

A drafter without a model needs no pair. A drafter model is loaded without its target; a trained draft head with it,
since it shares the target's embeddings. The target is loaded, too, if its passes are to be timed. Knows no decoding and
no figures.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from app.chat.conversation import ChatSettings, Conversation
from app.lanes.drafters import PairDrafters
from app.lanes.pairing import choose_pair, load_options
from app.prompts.questions import read_questions
from app.screen.output import load_engine, load_progress, target_tokenizer
from app.settings.table import ModelOptions, Settings
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import decoder_start_id
from sampling.recorded import Arch, RecordedAnswers, RecordedLM, read_answers
from utils.catalogue.catalogue import head_kind
from utils.catalogue.heads import PUBLISHED_KINDS
from utils.catalogue.specs import CASCADES, ModelSpec, PairSpec, head_kind_of
from utils.errors import UsageError, UserError, raise_first, shown
from utils.loading.fit import fingerprint
from utils.loading.loaded import NO_LIMIT, LoadedModel, LoadedPair
from utils.loading.loading import load_pair
from utils.objects import HfTokenizer, Json

_PLAIN_NEEDS_TARGET = "a plain drafter shares its target's embeddings: --pair or --target names that target"
RECORDING = 1  # the version of what `record` writes
_TARGET_STATES_READ_BY = {"glide": "keys and values", **dict.fromkeys(("feature", *PUBLISHED_KINDS), "hidden states")}


@dataclass(frozen=True)
class RecordedPair:
    """The recorded target with its drafters. `network`: the real target, if it was loaded."""

    lm: RecordedLM
    recorded: RecordedAnswers
    stop: frozenset[int]
    loaded: LoadedPair
    drafters: PairDrafters
    network: CausalLM | None = None

    def drafter_word(self, method: str) -> str:
        """Return the word of the drafter under a name of `--methods`."""
        return self.loaded.drafter_word if method == "spec" else method


def load_recorded_pair(
    settings: Settings, options: ModelOptions, args: Namespace, cancelled: Callable[[], bool]
) -> RecordedPair:
    """Read the recorded answers and load the drafters. UserError, in one line, for drafters that they cannot serve."""
    named = options.pair is not None or options.target is not None
    if not named and head_kind_of(options.drafter or "") == "plain":
        raise UsageError(_PLAIN_NEEDS_TARGET)
    spec = choose_pair(options if named else options.changed(target="recorded"))
    kinds = {word: head_kind_of(word) or "" for word in _drafter_words(spec, settings, args)}
    raise_first(
        {
            f"drafter {word} reads its target's {_TARGET_STATES_READ_BY.get(kind)}, and a recording has none (plain "
            "reads neither)": kind in _TARGET_STATES_READ_BY
            for word, kind in kinds.items()
        }
    )
    file = _RecordedFile(args, _prompt_candidates(settings, options, args, cancelled))
    recorded, shares = file.read(None if args.arch == "auto" else args.arch), "plain" in kinds.values()
    if shares and not named:
        raise UsageError(_PLAIN_NEEDS_TARGET)
    if shares or (named and not args.t_verify and not recorded.pass_seconds):
        engine = load_engine(settings, options, cancelled)
        recorded = file.fitting(recorded, engine.loaded.target, engine.tokenizer)
        return RecordedPair(
            RecordedLM.of(recorded, args.end_id or 0, engine.target.vocab_size),
            recorded,
            file.stop(recorded, engine.tokenizer),
            engine.loaded,
            engine.drafters,
            engine.target,
        )
    return _alone(spec, settings, options, file, recorded, cancelled)


def _drafter_words(spec: PairSpec, settings: Settings, args: Namespace) -> list[str]:
    """Return the words of all drafters, those in cascades included; "model" for a model."""
    words: list[str] = []
    for method in args.methods:
        word: Any = spec.drafter if method == "spec" else method
        if not isinstance(word, str):
            word = (head_kind(word.path) if word.path is not None else None) or "model"
        words += [*(settings.cascade or spec.cascade_names)] if word in CASCADES else [word]
    return words


def _prompt_candidates(
    settings: Settings, options: ModelOptions, args: Namespace, cancelled: Callable[[], bool]
) -> list[list[list[int]]] | None:
    """Return, for each of --prompts, the ids with which its recorded row may begin: in the chat template, with special
    tokens, and without.

    The tokenizer is the target's, or if none is named the drafter's.
    """
    if args.prompts is None:
        return None
    texts = [question.turns[0] for question in read_questions(args.prompts)]
    if options.pair is None and options.target is None:
        if options.drafter is None:
            raise UsageError("--prompts needs a tokenizer: --pair, --target or --drafter names a model that has one")
        options = options.changed(target=options.drafter, drafter=None)
    tokenizer = target_tokenizer(settings, options, cancelled)
    chat = Conversation(tokenizer, frozenset(), NO_LIMIT, False, *ChatSettings.of(settings))
    plain = [[list(tokenizer(text, add_special_tokens=also)["input_ids"]) for also in (True, False)] for text in texts]
    return [[chat.plan(text).prompt, *beginnings] for text, beginnings in zip(texts, plain, strict=True)]


def check_header(file: object, header: Json) -> None:
    """Raise UserError for a recording of another version, and for facts of another form than `record` writes."""
    raise_first(
        {
            f"{file}:1: it was written in format {header.get('recording')!r}, this program reads {RECORDING}": (
                header.get("recording", RECORDING) != RECORDING
            ),
            **{
                f"{file}:1: {name} must be an object, got {shown(header.get(name))}": (
                    not isinstance(header.get(name, {}), dict)
                )
                for name in ("settings", "machine")
            },
        },
        UserError,
    )


@dataclass(frozen=True)
class _RecordedFile:
    """The file of recorded answers. How it is read depends on whether the model is an encoder-decoder. `starts`: the
    ids with which each row may begin, as :func:`_prompt_candidates` returns them."""

    args: Namespace
    starts: list[list[list[int]]] | None

    def read(self, arch: Arch | None, start_id: int | None = None) -> RecordedAnswers:
        recorded = read_answers(self.args.file, self.starts, self.args.prompt_tokens, arch, start_id)
        check_header(self.args.file, recorded.header)
        if not recorded.answers:
            raise UserError(f"{self.args.file} holds no recorded answer")
        return replace(recorded, answers=recorded.answers[: self.args.limit])

    def fitting(self, recorded: RecordedAnswers, model: LoadedModel, tokenizer: HfTokenizer) -> RecordedAnswers:
        """Return the answers, read again if the model turns out to be an encoder-decoder; UserError if the file's ids
        are not the model's."""
        begins = decoder_start_id(model.model) if model.encodes else None
        if begins is not None and "start_id" not in recorded.header and self.args.arch == "auto":
            recorded = self.read("seq2seq", begins)
        unfit = f"{model.name} does not fit {self.args.file}: "
        mark, start = recorded.header.get("tokenizer"), recorded.header.get("start_id")
        own = mark if tokenizer is None else fingerprint(tokenizer)
        raise_first(
            {
                f"{unfit}the recording was made with another tokenizer ({mark}, here {own})": mark not in (None, own),
                f"{unfit}{recorded.highest} is no id of its {model.vocab_size}": recorded.highest >= model.vocab_size,
                f"{unfit}one of the two is an encoder-decoder model's, the other is not": (begins is None)
                != (start is None),
                f"{unfit}its decoder starts from id {begins}, the recording from {start}": begins != start,
            },
            UserError,
        )
        return recorded

    def stop(self, recorded: RecordedAnswers, tokenizer: HfTokenizer) -> frozenset[int]:
        """Return the ids that end an answer: --end-id, else the file's, else the tokenizer's."""
        if self.args.end_id is not None:
            return frozenset([self.args.end_id])
        own = getattr(tokenizer, "eos_token_id", None)
        return recorded.stop_ids or frozenset([] if own is None else [own])


# -- loading ----------------------------------------------------------------------------------------


def _alone(
    spec: PairSpec,
    settings: Settings,
    options: ModelOptions,
    file: _RecordedFile,
    recorded: RecordedAnswers,
    cancelled: Callable[[], bool],
) -> RecordedPair:
    """Load the drafter, or the models of a cascade, without the target, of which only name and vocabulary are known."""
    word, wanted = ("model", [spec.drafter]) if isinstance(spec.drafter, ModelSpec) else (spec.drafter, [])
    models: dict[str, LoadedModel] = {}
    tokenizer = None
    for model in spec.cascade_models if word in CASCADES else wanted:
        models[model.name], tokenizer = _model(model, settings, options, cancelled)
        recorded = file.fitting(recorded, models[model.name], tokenizer)
    if not models and spec.arch == "seq2seq" and file.args.arch == "auto" and "start_id" not in recorded.header:
        recorded = file.read("seq2seq")
    size = recorded.header.get("vocab_size") or max(
        [recorded.highest + 1, *(model.vocab_size for model in models.values())]
    )
    lm = RecordedLM.of(recorded, file.args.end_id or 0, size)
    loaded = LoadedPair(
        spec=spec,
        target=LoadedModel(
            model=None,
            name=lm.name,
            device=torch.device("cpu"),
            dtype=torch.float32,
            quantization="none",
            context=lm.context,
            vocab_size=lm.vocab_size,
            encodes=lm.encodes,
        ),
        drafter=next(iter(models.values())) if word == "model" else None,
        drafter_word=word,
        tokenizer=tokenizer,
        stop_ids=frozenset(),
        vocab_size=lm.vocab_size,
        context=lm.context,
        cascade_models=models if word in CASCADES else {},
    )
    drafters = PairDrafters(loaded, lm, recorded.header.get("tokenizer"))  # type: ignore[arg-type]  # only its size counts
    return RecordedPair(lm, recorded, file.stop(recorded, tokenizer), loaded, drafters)


def _model(
    spec: ModelSpec, settings: Settings, options: ModelOptions, cancelled: Callable[[], bool]
) -> tuple[LoadedModel, Any]:
    """Load a drafter's model and tokenizer as if it were a target, on the drafter's device."""
    how = replace(
        load_options(options),
        device=options.drafter_device or options.device,
        quantization=options.drafter_quantization,
        revision=None,
    )
    with load_progress(sys.stderr, quiet=settings.quiet, cancelled=cancelled) as progress:
        loaded = load_pair(PairSpec(name=spec.name, target=spec, drafter="none"), how, progress)
    return loaded.target, loaded.tokenizer
