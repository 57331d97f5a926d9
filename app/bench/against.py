"""What `bench --against` names: the rivals of a run. Those of transformers are here, as anyone gets them without us.

* hf-plain: no drafts. hf-lookup: `prompt_lookup_num_tokens=10`. hf-assisted: `assistant_model`, a drafter model or a
  plain draft head, with transformers' defaults (20 tokens, fewer where the drafter is unsure).
* The target is a plain copy (`nn.Linear` as usual, nothing packed), with transformers' own attention and cache.

A streamer hears each token (with drafts: each accepted run) as it is known; reading the prompt is there also the
drafter's, with the first drafts. What is measured, and the other programs, are in app/bench/rivals.py. Knows no figures
of drafts.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from app.bench.rivals import LLAMA_CPP, ONNXRUNTIME, Arrivals, Rival, check_installed, llama_rivals, onnx_rivals
from app.screen.output import LoadProgress
from app.settings.table import ModelOptions, Settings
from utils.errors import UsageError

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine
    from utils.loading.loaded import LoadedPair


TRANSFORMERS = "transformers"
PLAIN, LOOKUP, ASSISTED = "hf-plain", "hf-lookup", "hf-assisted"
LOOKUP_TOKENS = 10


class Streamer(Arrivals):
    """What `generate` reports to."""

    def begin(self) -> None:
        super().begin()
        self._prompt = True

    def put(self, tokens: Any) -> None:
        """Tokens [1, n] or [1]; the first call brings the prompt."""
        if not self._prompt:
            self.add(tokens.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""


@dataclass
class Generate(Rival):
    """One way of calling `generate` of `model` (a plain transformers model); `more` is what makes it this way."""

    model: Any
    vocab_size: int
    more: Mapping[str, Any] = field(default_factory=dict)

    another: ClassVar[bool] = False
    hears: ClassVar[type[Arrivals]] = Streamer

    def say(self, prompt: list[int], settings: Settings, limit: int, arrivals: Arrivals) -> None:
        import torch

        from utils.loading.quiet import quiet_warnings

        ids = torch.tensor([prompt], device=self.model.device)
        cuda = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), quiet_warnings():
            torch.manual_seed(settings.seed)
            arrivals.begin()
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=limit,
                streamer=arrivals,
                **sampling_of(settings),
                **self._padding(),
                **self.more,
            )

    def _padding(self) -> dict[str, Any]:
        """Rows of the head that stand for no token are never chosen (our lanes leave them out)."""
        surplus = range(self.vocab_size, self.model.config.get_text_config().vocab_size)
        return {"suppress_tokens": list(surplus)} if surplus else {}


def sampling_of(settings: Settings) -> dict[str, Any]:
    """The settings' distribution as arguments of `generate`, which applies them in our order."""
    rules = {"repetition_penalty": settings.repetition_penalty} if settings.repetition_penalty != 1 else {}
    rules |= {"no_repeat_ngram_size": settings.no_repeat_ngram} if settings.no_repeat_ngram else {}
    if settings.temperature == 0:
        return {"do_sample": False, **rules}
    return {
        **rules,
        "do_sample": True,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p or None,
    }


def make_rivals(engine: PairEngine, options: ModelOptions, against: str) -> tuple[dict[str, Generate], list[str]]:
    """transformers' ways, by name, and lines about what is left out.

    `against` is `transformers`, or `transformers:DRAFTER` with the drafter (a plain draft head or a transformers model)
    that hf-assisted gets instead of the pair's own (or, where that is of another kind, the pair's plain draft head).
    Raises UserError for a drafter that cannot be loaded or does not fit.
    """
    from utils.kernels.packed_linear import unpacked_copy

    if engine.loaded.target.shard is not None:
        raise UsageError(f"--against {TRANSFORMERS} needs the whole target in one process: leave torchrun out")
    loaded, drafter = engine.loaded, against.partition(":")[2]
    model = without_defaults(unpacked_copy(loaded.target.model), engine.stop_ids)
    ways: dict[str, dict[str, Any]] = {PLAIN: {}, LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    pair = _other(engine, options, drafter) if drafter else loaded
    assistant = _assistant(pair, engine)
    notes: list[str] = []
    if isinstance(assistant, str):
        notes.append(f"{ASSISTED} is left out: {assistant}")
    else:
        ways[ASSISTED] = {"assistant_model": without_defaults(assistant, engine.stop_ids)}
    facts = (engine.stop_ids, engine.context, model, engine.target.vocab_size)
    return {name: Generate(name, *facts, more) for name, more in ways.items()}, notes


def named(against: str | None, settings: Settings) -> list[str]:
    """The programs of --against. UsageError for one that is not installed, or has no rule for the settings."""
    found = [] if against is None else against.split(",")
    for program in found:
        check_installed(program, settings)
    return found


def rivals_of(
    engine: PairEngine,
    settings: Settings,
    options: ModelOptions,
    programs: Sequence[str],
    cancelled: Callable[[], bool],
) -> tuple[Mapping[str, Rival], Sequence[str]]:
    """What --against names, and what it is and what is left out of it in words, which are said at once."""
    from app.lanes.pairing import load_options

    rivals: dict[str, Rival] = {}
    notes: list[str] = []
    for program in programs:
        make = {LLAMA_CPP: llama_rivals, ONNXRUNTIME: onnx_rivals}.get(program)
        if make is None:
            ways, said = make_rivals(engine, options, program)
            rivals |= ways
            notes += said
            continue
        with LoadProgress(sys.stderr, quiet=settings.quiet) as progress:
            others, note = make(engine, load_options(options), progress, cancelled)
        rivals |= {one.name: one for one in others}
        notes.append(note)
    if not settings.quiet:
        sys.stderr.write("".join(f"{note}\n" for note in notes))
    return rivals, notes


def without_defaults(model: Any, stop_ids: frozenset[int]) -> Any:
    """`model` without preferences of its own but where an answer ends; shares everything with it, changes nothing."""
    twin = copy.copy(model)
    twin.generation_config = bare_config(stop_ids, getattr(model.generation_config, "decoder_start_token_id", None))
    return twin


def bare_config(stop_ids: frozenset[int], start_id: int | None) -> Any:
    """How `generate` ends an answer and begins a decoder's; nothing else is preferred."""
    from transformers import GenerationConfig

    stop = sorted(stop_ids)
    ends: dict[str, Any] = {"eos_token_id": stop or None, "pad_token_id": stop[0] if stop else 0}
    return GenerationConfig(**ends, decoder_start_token_id=start_id)  # type: ignore[no-untyped-call]


def _other(engine: PairEngine, options: ModelOptions, drafter: str) -> LoadedPair:
    """The pair with this drafter. UsageError if `generate` can use none of its kind."""
    from app.lanes.pairing import load_options, with_drafter
    from utils.loading.loading import load_drafter

    pair = load_drafter(engine.loaded, with_drafter(engine.loaded.spec, drafter), load_options(options))
    if pair.drafter_kind not in ("model", "plain"):
        raise UsageError(
            f"--against {TRANSFORMERS}:{drafter}: transformers has no {pair.drafter_kind} drafter, "
            "name a model or a plain one"
        )
    return pair


def _assistant(pair: LoadedPair, engine: PairEngine) -> Any:
    """The drafter of `pair` (else its plain draft head) as a transformers model, or why `generate` can have none."""
    from utils.kernels.packed_linear import unpacked_copy

    if pair.drafter is not None and pair.drafter_kind == "model":
        theirs, ours = pair.drafter.vocab_size, pair.target.vocab_size
        if pair.drafter.vocabulary is not None:
            return f"the lane takes no drafter with other tokens than the target's, and {pair.drafter.name} has others"
        if theirs != ours:
            return f"transformers takes no drafter with another number of logits ({theirs:,}, the target's {ours:,})"
        return unpacked_copy(pair.drafter.model)
    folder = pair.draft_head if pair.drafter_kind == "plain" else None
    if folder is None:
        try:
            folder = pair.spec.head_folder("plain")
        except UsageError:
            named = f"--against {TRANSFORMERS}:DRAFTER names a model or a plain one"
            return f"transformers has no {pair.drafter_kind} drafter ({named})"
    from sampling.drafters.draft_heads.checkpoint import load_student
    from training.draft_heads.export import llama_of
    from utils.loading.fit import fingerprint

    student = load_student(folder, pair.target.model, fingerprint(engine.tokenizer))
    model: Any = llama_of(student)
    return model.to(pair.target.device, pair.target.dtype)
