"""A recording in its target's place: the recorded target, and what drafts for it, loaded as far as it must be.

A drafter without a model needs no pair; a model is loaded by itself; a trained drafter comes with its target, whose
embeddings it shares. The target is loaded, too, where its passes are to be timed. Knows no decoding and no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.conversation import Conversation
from app.oneshot import LoadProgress, load_engine
from app.pairing import choose_pair, load_options
from app.prompts import read_questions
from sampling.recorded import RecordedLM
from sampling.recordings import Recording, read_recording
from utils.errors import UsageError, UserError
from utils.specs import BEHIND, CASCADES, ModelSpec, PairSpec, trained_kind
from utils.students import student_kind

if TYPE_CHECKING:
    from app.drafters import Drafters
    from app.settings import ModelOptions, Settings
    from app.simulate_fields import SimulateArgs
    from sampling.causal import CausalLM
    from utils.loaded import LoadedModel, LoadedPair

_NO_LIMIT = 1 << 60
_SHARES = "a plain drafter shares its target's embeddings: --pair or --target names that target"


@dataclass(frozen=True)
class StandIn:
    """The recorded target with what drafts for it. `network`: the real target, where it was loaded."""

    lm: RecordedLM
    recording: Recording
    stop: frozenset[int]
    loaded: LoadedPair
    drafters: Drafters
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
    recording = _read(settings, options, args, named, cancelled)
    trained = any(trained_kind(kind) == "plain" for kind in kinds)
    if trained and not named:
        raise UsageError(_SHARES)
    timed = named and not args.t_verify and not recording.pass_seconds
    if trained or timed:
        return _beside_target(settings, options, args, recording, cancelled)
    return _alone(spec, settings, options, args, recording, cancelled)


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
    trained = BEHIND.get(kind) or kind.removeprefix("match+")
    if trained in ("glide", "feature"):
        what = "keys and values" if trained == "glide" else "hidden states"
        raise UsageError(f"drafter {kind} reads its target's {what}, and a recording has none (plain reads neither)")


def _read(
    settings: Settings, options: ModelOptions, args: SimulateArgs, named: bool, cancelled: Callable[[], bool]
) -> Recording:
    if args.prompts is None:
        found = read_recording(args.file, None, args.prompt_tokens)
    else:
        questions = read_questions(args.prompts)
        starts = _starts([one.turns[0] for one in questions], settings, _speaking(options, named), cancelled)
        found = read_recording(args.file, starts, args.prompt_tokens)
    if not found.answers:
        raise UserError(f"{args.file} holds no recorded answer")
    return replace(found, answers=found.answers[: args.limit])


def _speaking(options: ModelOptions, named: bool) -> ModelOptions:
    """Whose tokenizer makes ids of the prompts: the target's, or where none is named the drafter's."""
    return options if named else options.changed(target=options.drafter, drafter=None)


def _starts(
    texts: Sequence[str], settings: Settings, options: ModelOptions, cancelled: Callable[[], bool]
) -> list[list[list[int]]]:
    """What the rows may begin with: the prompt in its chat template, or as it is with and without special tokens."""
    from app.build_tables import target_tokenizer

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
    settings: Settings, options: ModelOptions, args: SimulateArgs, recording: Recording, cancelled: Callable[[], bool]
) -> StandIn:
    engine = load_engine(settings, options, cancelled)
    _check_fit(args.file, recording, engine.loaded.target, engine.tokenizer)
    lm = RecordedLM.of(recording, args.end_id or 0, engine.target.vocab_size)
    stop = _stop(args, recording, engine.tokenizer)
    return StandIn(lm, recording, stop, engine.loaded, engine.drafters, engine.target)


def _alone(
    spec: PairSpec,
    settings: Settings,
    options: ModelOptions,
    args: SimulateArgs,
    recording: Recording,
    cancelled: Callable[[], bool],
) -> StandIn:
    """Without the target: its drafter, or the models of its cascade, each by itself."""
    from app.drafters import Drafters

    kind = spec.drafter if isinstance(spec.drafter, str) else "model"
    wanted = spec.cascade_models if kind in CASCADES else ([] if isinstance(spec.drafter, str) else [spec.drafter])
    models: dict[str, LoadedModel] = {}
    tokenizer = None
    for one in wanted:
        models[one.name], tokenizer = _model(one, settings, options, cancelled)
        _check_fit(args.file, recording, models[one.name], tokenizer)
    size = min([one.vocab_size for one in models.values()] + [recording.vocab_size or (1 << 60)])
    size = size if size < 1 << 60 else recording.highest + 1
    lm = RecordedLM.of(recording, args.end_id or 0, size)
    drafter = next(iter(models.values()), None) if kind == "model" else None
    cascade = models if kind in CASCADES else {}
    loaded = _pair(spec, kind, lm, drafter, cascade, tokenizer)
    drafters = Drafters(loaded, lm, recording.header.get("tokenizer"))  # type: ignore[arg-type]  # its size is all that counts
    return StandIn(lm, recording, _stop(args, recording, tokenizer), loaded, drafters)


def _model(
    spec: ModelSpec, settings: Settings, options: ModelOptions, cancelled: Callable[[], bool]
) -> tuple[LoadedModel, Any]:
    """A drafter's model and tokenizer, loaded as if it were a target; where the drafter is to run."""
    import sys

    from utils.loading import load_pair

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

    from utils.loaded import LoadedModel, LoadedPair

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


def _check_fit(file: Path, recording: Recording, model: LoadedModel, tokenizer: Any) -> None:
    """UserError where the recording's ids are not the model's."""
    from utils.fit import fingerprint

    mark = recording.header.get("tokenizer")
    if mark is not None and tokenizer is not None and fingerprint(tokenizer) != mark:
        raise UserError(
            f"{model.name} does not fit {file}: the recording was made with another tokenizer "
            f"({mark}, here {fingerprint(tokenizer)})"
        )
    if recording.highest >= model.vocab_size:
        raise UserError(f"{model.name} does not fit {file}: {recording.highest} is no id of its {model.vocab_size}")
    if model.encodes != (recording.header.get("start_id") is not None):
        raise UserError(
            f"{model.name} does not fit {file}: one of the two is an encoder-decoder model's, the other is not"
        )
