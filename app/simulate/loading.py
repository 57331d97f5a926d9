"""A recording in its target's place: the recorded target, and what drafts for it, loaded as far as it must be.

A drafter without a model needs no pair; a model is loaded by itself; a trained drafter comes with its target, whose
embeddings it shares. The target is loaded, too, where its passes are to be timed. Knows no decoding and no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.chat.conversation import Conversation
from app.lanes.pairing import choose_pair, load_options
from app.prompts.questions import read_questions
from app.screen.output import LoadProgress, load_engine
from sampling.recorded.answers import Arch, Recording, read_recording
from sampling.recorded.target import RecordedLM
from utils.catalogue.catalogue import student_kind
from utils.catalogue.specs import CASCADES, ModelSpec, PairSpec, trained_kind
from utils.errors import UsageError, UserError

if TYPE_CHECKING:
    from app.lanes.drafters import PairDrafters
    from app.settings.layers import ModelOptions, Settings
    from app.simulate.options import SimulateArgs
    from sampling.models.causal import CausalLM
    from utils.loading.loaded import LoadedModel, LoadedPair


Reader = Callable[[Arch | None, int | None], Recording]

_NO_LIMIT = 1 << 60
_SHARES = "a plain drafter shares its target's embeddings: --pair or --target names that target"


@dataclass(frozen=True)
class StandIn:
    """The recorded target with what drafts for it. `network`: the real target, where it was loaded."""

    lm: RecordedLM
    recording: Recording
    stop: frozenset[int]
    loaded: LoadedPair
    drafters: PairDrafters
    network: CausalLM | None = None

    def kind(self, method: str) -> str:
        """What drafts under this name."""
        return self.loaded.drafter_kind if method == "spec" else method


def stand_in(settings: Settings, options: ModelOptions, args: SimulateArgs, cancelled: Callable[[], bool]) -> StandIn:
    """Read the recording and load what drafts. UserError, in one line, for what cannot draft for a recording."""
    named = options.pair is not None or options.target is not None
    if not named and trained_kind(options.drafter or "") == "plain":
        raise UsageError(_SHARES)
    spec = choose_pair(options if named else options.changed(target="recorded"))
    kinds = _kinds(spec, settings, args)
    for kind in kinds:
        _refuse(kind)
    read = _reader(settings, options, args, named, cancelled)
    recording = read(None if args.arch == "auto" else args.arch, None)
    trained = any(trained_kind(kind) == "plain" for kind in kinds)
    if trained and not named:
        raise UsageError(_SHARES)
    timed = named and not args.t_verify and not recording.pass_seconds
    if trained or timed:
        return _beside_target(settings, options, args, recording, read, cancelled)
    return _alone(spec, settings, options, args, recording, read, cancelled)


def _kinds(spec: PairSpec, settings: Settings, args: SimulateArgs) -> list[str]:
    """The words of all that is to draft, those in cascades included; "model" for a model."""
    found: list[str] = []
    for method in args.methods:
        drafter: Any = spec.drafter if method == "spec" else method
        kind = drafter if isinstance(drafter, str) else _kind_of_model(drafter)
        found += [*(settings.cascade or spec.cascade_names)] if kind in CASCADES else [kind]
    return found


def _kind_of_model(model: ModelSpec) -> str:
    return (student_kind(model.path) if model.path is not None else None) or "model"


def _refuse(kind: str) -> None:
    trained = trained_kind(kind)
    if trained in ("glide", "feature"):
        what = "keys and values" if trained == "glide" else "hidden states"
        raise UsageError(f"drafter {kind} reads its target's {what}, and a recording has none (plain reads neither)")


def _reader(
    settings: Settings, options: ModelOptions, args: SimulateArgs, named: bool, cancelled: Callable[[], bool]
) -> Reader:
    """What reads the file as a model's of some kind."""
    starts = None
    if args.prompts is not None:
        questions = read_questions(args.prompts)
        starts = _starts([one.turns[0] for one in questions], settings, _speaking(options, named), cancelled)

    def read(arch: Arch | None, start_id: int | None) -> Recording:
        found = read_recording(args.file, starts, args.prompt_tokens, arch, start_id)
        if not found.answers:
            raise UserError(f"{args.file} holds no recorded answer")
        return replace(found, answers=found.answers[: args.limit])

    return read


def _speaking(options: ModelOptions, named: bool) -> ModelOptions:
    """Whose tokenizer makes ids of the prompts: the target's, or where none is named the drafter's."""
    return options if named else options.changed(target=options.drafter, drafter=None)


def _starts(
    texts: Sequence[str], settings: Settings, options: ModelOptions, cancelled: Callable[[], bool]
) -> list[list[list[int]]]:
    """What the rows may begin with: the prompt in its chat template, or as it is with and without special tokens."""
    from app.screen.output import target_tokenizer

    if options.target is None and options.pair is None:
        raise UsageError("--prompts needs a tokenizer: --pair, --target or --drafter names a model that has one")
    tokenizer, _ = target_tokenizer(settings, options, cancelled)
    chat = Conversation(
        tokenizer, frozenset(), _NO_LIMIT, system=settings.system, chat=settings.chat, template=settings.template
    )
    plain = [[list(tokenizer(text, add_special_tokens=also)["input_ids"]) for also in (True, False)] for text in texts]
    return [[chat.plan(text).prompt, *ways] for text, ways in zip(texts, plain, strict=True)]


# -- loading ----------------------------------------------------------------------------------------


def _beside_target(
    settings: Settings,
    options: ModelOptions,
    args: SimulateArgs,
    recording: Recording,
    read: Reader,
    cancelled: Callable[[], bool],
) -> StandIn:
    engine = load_engine(settings, options, cancelled)
    recording = _fitting(args, recording, read, engine.loaded.target, engine.tokenizer)
    lm = RecordedLM.of(recording, args.end_id or 0, engine.target.vocab_size)
    stop = _stop(args, recording, engine.tokenizer)
    return StandIn(lm, recording, stop, engine.loaded, engine.drafters, engine.target)


def _alone(
    spec: PairSpec,
    settings: Settings,
    options: ModelOptions,
    args: SimulateArgs,
    recording: Recording,
    read: Reader,
    cancelled: Callable[[], bool],
) -> StandIn:
    """Without the target: its drafter, or the models of its cascade, each by itself."""
    from app.lanes.drafters import PairDrafters

    kind = spec.drafter if isinstance(spec.drafter, str) else "model"
    wanted = spec.cascade_models if kind in CASCADES else ([] if isinstance(spec.drafter, str) else [spec.drafter])
    models: dict[str, LoadedModel] = {}
    tokenizer = None
    for one in wanted:
        models[one.name], tokenizer = _model(one, settings, options, cancelled)
        recording = _fitting(args, recording, read, models[one.name], tokenizer)
    if not models and spec.arch == "seq2seq" and args.arch == "auto" and "start_id" not in recording.header:
        recording = read("seq2seq", None)
    size = recording.vocab_size or max([recording.highest + 1, *(one.vocab_size for one in models.values())])
    lm = RecordedLM.of(recording, args.end_id or 0, size)
    drafter = next(iter(models.values()), None) if kind == "model" else None
    cascade = models if kind in CASCADES else {}
    loaded = _pair(spec, kind, lm, drafter, cascade, tokenizer)
    drafters = PairDrafters(loaded, lm, recording.header.get("tokenizer"))  # type: ignore[arg-type]  # its size is all that counts
    return StandIn(lm, recording, _stop(args, recording, tokenizer), loaded, drafters)


def _model(
    spec: ModelSpec, settings: Settings, options: ModelOptions, cancelled: Callable[[], bool]
) -> tuple[LoadedModel, Any]:
    """A drafter's model and tokenizer, loaded as if it were a target; where the drafter is to run."""
    import sys

    from utils.loading.loading import load_pair

    place = replace(
        load_options(options),
        device=options.drafter_device or options.device,
        quantization=options.drafter_quantization,
        revision=None,
    )
    progress = LoadProgress(sys.stderr, quiet=settings.quiet)
    try:
        loaded = load_pair(PairSpec(name=spec.name, target=spec, drafter="none"), place, progress, cancelled)
    finally:
        progress.close()
    return loaded.target, loaded.tokenizer


def _pair(
    spec: PairSpec,
    kind: str,
    lm: RecordedLM,
    drafter: LoadedModel | None,
    cascade: Mapping[str, LoadedModel],
    tokenizer: Any,
) -> LoadedPair:
    """A pair whose target is the recording: it has a name and a vocabulary, and no model."""
    import torch

    from utils.loading.loaded import LoadedModel, LoadedPair

    cpu = torch.device("cpu")
    target = LoadedModel(None, lm.name, 0, 0, cpu, torch.float32, "none", lm.context, lm.vocab_size, 0.0, lm.encodes)
    return LoadedPair(
        spec=spec,
        target=target,
        drafter=drafter,
        drafter_kind=kind,
        tokenizer=tokenizer,
        stop_ids=frozenset(),
        vocab_size=lm.vocab_size,
        context=lm.context,
        cascade_models=cascade,
    )


def _stop(args: SimulateArgs, recording: Recording, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: --end-id, else what the recording tells, else the tokenizer's."""
    if args.end_id is not None:
        return frozenset([args.end_id])
    own = getattr(tokenizer, "eos_token_id", None)
    return recording.stop_ids or frozenset([] if own is None else [own])


def _fitting(args: SimulateArgs, recording: Recording, read: Reader, model: LoadedModel, tokenizer: Any) -> Recording:
    """The recording read as one of the model's kind; UserError where its ids are not the model's."""
    from sampling.models.encoder_decoder import decoder_start_id
    from utils.loading.fit import fingerprint

    begins = decoder_start_id(model.model) if model.encodes else None
    if begins is not None and "start_id" not in recording.header and args.arch == "auto":
        recording = read("seq2seq", begins)
    unfit = f"{model.name} does not fit {args.file}: "
    mark, start = recording.header.get("tokenizer"), recording.header.get("start_id")
    if mark is not None and tokenizer is not None and fingerprint(tokenizer) != mark:
        raise UserError(f"{unfit}the recording was made with another tokenizer ({mark}, here {fingerprint(tokenizer)})")
    if recording.highest >= model.vocab_size:
        raise UserError(f"{unfit}{recording.highest} is no id of its {model.vocab_size}")
    if (begins is None) != (start is None):
        raise UserError(f"{unfit}one of the two is an encoder-decoder model's, the other is not")
    if begins != start:
        raise UserError(f"{unfit}its decoder starts from id {begins}, the recording from {start}")
    return recording
