"""The one-call functions: each checks its arguments, builds its parts and drains the loop. Models of transformers in,
new ids out.

An unusable argument is refused in one line that names the remedy. The calls for encoder-decoder models (T5 and the
like) are the same under other names; beam search drains :func:`sampling.beam.beam_generate`. Knows no text; a
tokenizer, if given, provides stop ids and its size.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from numbers import Integral
from typing import Any, TypeVar, cast

import torch

from sampling.beam import BeamPlan, EarlyStopping, beam_generate
from sampling.drafters.cascade import cascade_of
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.tables.ngram import NgramDrafter, NGramStorage
from sampling.events import BeamStep, BeamTree, Event, Step
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import check_same_kind, is_encoder_decoder, lm_of
from sampling.recorded import RecordedLM
from sampling.sampler import Coupling, DraftSampling, KeyedSampler
from sampling.types import LM, Drafter, FixedPace, Limits, Sampler, Traits
from utils.errors import UserError, did_you_mean, shown, whole
from utils.logits_processors import GreedyProcessor, LogitsProcessor
from utils.objects import HfModel, HfTokenizer, Json

Ids = Sequence[int] | torch.Tensor
Stop = int | Iterable[int] | None
Seed = int | torch.Generator

# Padded vocabularies of one tokenizer differ in size by fewer ids; a larger difference means another tokenizer.
MAX_VOCAB_PADDING = 1024
_REFUSED = {
    (
        "skip_sample_adjustment",
        True,
    ): "without the adjustment after a refusal the text no longer has the target's distribution",
    ("first_target", False): "the target always does the opening round (no drafts before the prompt is read)",
}
_TAKEN = ("use_cache", "debug", "first_target", "skip_sample_adjustment")
_SYNONYMS = {  # names that other libraries use
    **dict.fromkeys(("inputs", "prompt", "prompt_ids"), "input_ids"),
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_gen_len"),
    **dict.fromkeys(("eos_token_id", "stop", "stop_ids"), "end_tokens_id"),
    **dict.fromkeys(("temperature", "top_p", "top_k", "do_sample", "processor"), "logits_processor"),
    **dict.fromkeys(("generator", "random_seed"), "seed"),
    **dict.fromkeys(("num_assistant_tokens", "n_spec_tokens"), "gamma"),
    **dict.fromkeys(("assistant_model", "draft_model"), "drafter"),
}

_log = logging.getLogger("sampling")
_Call = TypeVar("_Call", bound=Callable[..., Any])
_ENDING = "eos_tokens_id pad_token_id use_cache"  # positions that romsto's calls share
_PLAIN_ORDER = f"input_ids target max_gen_len logits_processor {_ENDING} debug"
_SPEC_ORDER = (
    f"input_ids drafter target tokenizer gamma logits_processor max_gen_len {_ENDING} skip_sample_adjustment "
    "first_target debug"
)


def also_as(order: str, **names: str) -> Callable[[_Call], _Call]:
    """Let a call take its arguments also by position in this order and by other names, as romsto's Speculative-Decoding
    does.

    The order begins with the call's own positional parameters. The call's signature does not change.
    """
    positions, names = order.split(), {"inputs": "input_ids", **names}

    def decorate(function: _Call) -> _Call:
        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            call_name = f"{function.__name__}() "
            if len(given) > len(positions):
                raise TypeError(f"{call_name}takes at most {len(positions)} positional arguments, got {len(given)}")
            arguments = dict(zip(positions, given, strict=False))
            for alias, value in named.items():
                name = names.get(alias, alias)
                if name in arguments:
                    raise TypeError(f"{call_name}got multiple values for argument '{name}'")
                arguments[name] = value
            return function(**arguments)

        return cast(_Call, call)

    return decorate


def take_more(function: Callable[..., Any], more: Json) -> bool:
    """Check the arguments that change nothing or are refused; return whether `debug` is on.

    Raises TypeError for an unknown keyword, with the nearest known one; UserError for a value that cannot be honoured.
    """
    names = [name for name in inspect.signature(function).parameters if name != "more"]
    for name, value in more.items():
        if name not in _TAKEN:
            known = _SYNONYMS.get(name, "")
            hint = did_you_mean(known if known in names else name, [*names, *_TAKEN])
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'{hint}")
        if not isinstance(value, bool):
            raise UserError(f"{name} must be True or False, got {shown(value)}")
        if (name, value) in _REFUSED:
            raise UserError(f"{name}={value} is refused: {_REFUSED[name, value]}")
    return bool(more.get("debug", False))


def prompt_ids(given: Any, name: str = "input_ids") -> list[int]:
    """Return one prompt as ids, from a sequence of ints or a tensor [n] or [1, n]; UserError for anything else."""
    if isinstance(given, str):
        raise UserError(f"{name} must be token ids, got text: encode it first (tokenizer(text).input_ids)")
    rows = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(rows, Sequence):
        raise UserError(f"{name} must be a list of ids or a tensor of them, got {type(given).__name__}")
    if len(rows) == 1 and isinstance(rows[0], Sequence) and not isinstance(rows[0], str):
        rows = rows[0]
    if not len(rows):
        raise UserError(f"{'the prompt' if name == 'input_ids' else name} is empty: give at least one token")
    if isinstance(rows[0], Sequence) and not isinstance(rows[0], str):
        raise UserError(f"{name} must be one prompt, got {len(rows)} rows (Engine.generate takes several)")
    return _whole_ids(rows, f"{name} must be whole numbers")


def _whole_ids(tokens: Iterable[Any], rule: str) -> list[int]:
    """Return ids as integers; UserError, which begins with `rule`, for one that is no whole number."""
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise UserError(f"{rule}, got {shown(token)}")
    return list(map(int, tokens))


def sampler_of(
    processor: LogitsProcessor | None,
    seed: Seed,
    coupling: Coupling = "rejection",
    draft_sampling: DraftSampling = "law",
) -> KeyedSampler:
    """Return the sampler of a call. One number is drawn from a generator; the global one is never touched.

    UserError for another object than a processor, and for a seed that is no number.
    """
    if isinstance(processor, type):
        raise UserError(f"logits_processor must be an object, got the class {processor.__name__}: call it")
    if processor is not None and not (callable(processor) and hasattr(processor, "needs_prefixes")):
        raise UserError(
            f"logits_processor must be one of utils.logits_processors, got {type(processor).__name__}"
            " (GreedyProcessor(), NucleusProcessor(temperature, top_p) …)"
        )
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise UserError(f"seed must be a whole number or a torch.Generator, got {shown(seed)}")
    return KeyedSampler(processor or GreedyProcessor(), int(seed), coupling=coupling, draft_sampling=draft_sampling)


def stop_ids_of(end: Stop, eos: Stop, model: HfModel, tokenizer: HfTokenizer = None) -> frozenset[int]:
    """Return the caller's stop ids; without any, those of the model's generation config and of the tokenizer. UserError
    for values that are no ids."""
    given: list[Any] = [stop for stop in (end, eos) if stop is not None] or [
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
        model.end_id if isinstance(model, RecordedLM) else None,
    ]
    each = [stop.tolist() if hasattr(stop, "tolist") else stop for stop in given]
    several = [list(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else [stop] for stop in each]
    ids = [token for stop in several for token in stop if token is not None]  # None: the tokenizer has no end token
    return frozenset(_whole_ids(ids, "end_tokens_id must be an id or several"))


def drafter_of(model: HfModel, name: str = "drafter") -> Drafter:
    """Return an object with `propose` itself, or a drafter that drafts from a model; UserError for anything else."""
    if not hasattr(model, "propose"):
        return ModelDrafter(target_of(model, name))
    if not isinstance(getattr(model, "traits", None), Traits):
        raise UserError(f"{name} must have `traits`, among them the rule that judges its drafts: sampling.types.Traits")
    return cast(Drafter, model)


def target_of(model: HfModel, name: str = "target") -> LM:
    """Return the LM of a transformers model or a Network; an LM, such as RecordedLM, itself. UserError for others."""
    if isinstance(model, str):
        raise UserError(f"{name} must be a model, got {shown(model)}: load it (AutoModelForCausalLM.from_pretrained)")
    if isinstance(model, type) or not any(hasattr(model, part) for part in ("open", "new_cache", "config")):
        raise UserError(f"{name} must be a transformers model, got {shown(model)}")
    return model if hasattr(model, "open") else lm_of(model, name)


def check_drafters(target: LM, drafters: Sequence[Drafter], tokenizer: HfTokenizer = None) -> None:
    """Raise UserError for models on different devices, of different kinds, or with different tokenizers by their sizes.

    Smaller differences in size are allowed: a draft never has an id that only one of the two knows.
    """
    models = [model for drafter in drafters for model in drafter.models]
    check_same_kind([target, *models])
    for model in models:
        if None not in (model.device, target.device) and model.device != target.device:
            raise UserError(f"{model.name} is on {model.device}, the target on {target.device}: move one of them")
        if not (isinstance(target, CausalLM) and isinstance(model, CausalLM)):
            continue
        sizes = f"{model.name} has {model.vocab_size:,} ids, the target {target.vocab_size:,}"
        if tokenizer is not None and hasattr(tokenizer, "__len__"):
            if min(target.vocab_size, len(tokenizer)) - model.vocab_size >= MAX_VOCAB_PADDING:
                raise UserError(f"different vocabularies: {sizes}, and the tokenizer {len(tokenizer):,}")
        elif abs(target.vocab_size - model.vocab_size) >= MAX_VOCAB_PADDING:
            raise UserError(f"different vocabularies: {sizes} (one tokenizer for both? then give it)")


@also_as(_PLAIN_ORDER, model="target")
def autoregressive_generate(
    input_ids: Ids,
    target: HfModel | LM,
    *,
    logits_processor: LogitsProcessor | None = None,
    max_gen_len: int = 100,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    tokenizer: HfTokenizer = None,
    seed: Seed = 0,
    **more: Any,
) -> list[int]:
    """Plain decoding: one target pass a token.

    Args:
        input_ids: the prompt, at least one id: a list, or a tensor [n] or [1, n].
        target: a transformers model, causal or encoder-decoder (or a :class:`sampling.types.Network`, or an LM).
        logits_processor: greedy if None.
        max_gen_len: the most new ids.
        end_tokens_id: an id or several that end the answer (`eos_tokens_id` is the same). None:
            the model's own (and the tokenizer's, if given).
        pad_token_id: accepted for compatibility; nothing is padded.
        seed: an int, or a generator from which one is drawn. The global generator is never touched.
        more: `debug=True` logs every round (logger "sampling", level INFO). `use_cache` may be True or False: the
            cache is always used and changes no output.

    Returns:
        The new ids, the stop id included.

    Raises:
        UserError: an argument that cannot be used, in one line. TypeError: an unknown keyword.
    """
    lm, stop, debug = _prepared(autoregressive_generate, more, target, [], tokenizer, (end_tokens_id, eos_tokens_id))
    return _drain(lm, input_ids, NoDrafter(), sampler_of(logits_processor, seed), max_gen_len, stop, 0, debug)[0]


@also_as(_SPEC_ORDER)
def speculative_generate(
    input_ids: Ids,
    drafter: HfModel | Drafter,
    target: HfModel | LM,
    tokenizer: HfTokenizer = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    gamma: int = 4,
    max_gen_len: int = 100,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    seed: Seed = 0,
    coupling: Coupling = "rejection",
    draft_sampling: DraftSampling = "law",
    **more: Any,
) -> tuple[list[int], float]:
    """Speculative decoding with a draft model: the target's own distribution, fewer target passes.

    Args as in :func:`autoregressive_generate`. `gamma`: drafted tokens a round. `drafter`: a model, or an object that
    drafts, such as ``MaxGramDrafter()``. Two models must share one tokenizer; an id that only one of
    them has is never drafted.
    `more` also takes ``first_target=True`` and ``skip_sample_adjustment=False``, which are always so, and refuses the
    opposites.

    Returns:
        The new ids, and accepted / drafted (0.0 if nothing was drafted).
    """
    source, sampler = drafter_of(drafter), sampler_of(logits_processor, seed, coupling, draft_sampling)
    lm, stop, debug = _prepared(speculative_generate, more, target, [source], tokenizer, (end_tokens_id, eos_tokens_id))
    return _drain(lm, input_ids, source, sampler, max_gen_len, stop, gamma, debug)


@also_as(
    f"input_ids ngram target tokenizer gamma filler_top_k logits_processor max_gen_len {_ENDING} first_target "
    "stop_if_unknown debug",
    ngramstorage="ngram",
)
def ngram_assisted_speculative_generate(
    input_ids: Ids,
    ngram: NgramDrafter | None,
    target: HfModel | LM,
    tokenizer: HfTokenizer = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    gamma: int = 4,
    n: int = 3,
    filler_top_k: int = 3,
    stop_if_unknown: bool = True,
    max_gen_len: int = 100,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    seed: Seed = 0,
    **more: Any,
) -> tuple[list[int], float]:
    """Speculative decoding with n-gram drafts: no second model.

    Args as in :func:`speculative_generate`. `ngram` is a drafter of an earlier call, which keeps its own settings (an
    `NGramStorage` takes this call's), or None for a new one of `n`, `filler_top_k` and `stop_if_unknown`. UserError as
    there.
    """
    lm, stop, debug = _prepared(
        ngram_assisted_speculative_generate, more, target, [], tokenizer, (end_tokens_id, eos_tokens_id)
    )
    if not (ngram is None or hasattr(ngram, "propose")):
        raise UserError(f"ngram must be an NgramDrafter or None (a fresh one), got {type(ngram).__name__}")
    filler_top_k = whole("filler_top_k", filler_top_k, 1, "a whole number, at least 1")
    source = ngram or NgramDrafter(lm.vocab_size, n=n, top_k_filler=filler_top_k, stop_if_unknown=stop_if_unknown)
    source = source.under(filler_top_k, stop_if_unknown) if isinstance(source, NGramStorage) else source
    return _drain(lm, input_ids, source, sampler_of(logits_processor, seed), max_gen_len, stop, gamma, debug)


def cascade_generate(
    input_ids: Ids,
    drafters: Sequence[Any],
    target: HfModel | LM,
    k_matrix: Sequence[Sequence[int]],
    lenience: float = 1.0,
    max_gen_len: int = 200,
    *,
    tokenizer: HfTokenizer = None,
    logits_processor: LogitsProcessor | None = None,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    seed: Seed = 0,
    coupling: Coupling = "rejection",
    draft_sampling: DraftSampling = "law",
    **more: Any,
) -> tuple[list[int], float]:
    """Cascade Speculative Drafting (Chen et al., arXiv 2312.11462, algorithm 1).

    Args as in :func:`speculative_generate`, and:
        drafters: large to small; transformers models, or drafters such as ``MaxGramDrafter()``. All but the last
            review the drafts of the next ones, so they must be models.
        target: a transformers model, or a :class:`sampling.recorded.RecordedLM` for greedy decoding.
        k_matrix: row r is the reviewer (0 = the target), column c the number of tokens that drafter c + 1 adds.
        lenience: λ ≥ 1 of the reviews between drafters; the target's own reviews are exact for every λ.

    Returns:
        The new ids, and accepted / drafted of the target's reviews.

    Raises:
        UserError: as in :func:`speculative_generate`, and for drafters or a matrix that make no cascade.
    """
    if not isinstance(drafters, Iterable):
        raise UserError(f"drafters must be a list, large to small, got {type(drafters).__name__}")
    members = [drafter_of(member, f"drafter {number}") for number, member in enumerate(drafters, 1)]
    lm, stop, debug = _prepared(cascade_generate, more, target, members, tokenizer, (end_tokens_id, eos_tokens_id))
    cascade = cascade_of(members, k_matrix, lenience)
    sampler = sampler_of(logits_processor, seed, coupling, draft_sampling)
    return _drain(lm, input_ids, cascade, sampler, max_gen_len, stop, cascade.traits.most or 0, debug)


def _prepared(
    call: Callable[..., Any],
    more: Json,
    target: HfModel | LM,
    drafters: Sequence[Drafter],
    tokenizer: HfTokenizer,
    ends: tuple[Stop, Stop],
) -> tuple[LM, frozenset[int], bool]:
    """Return the target as an LM, the ids that end an answer, and whether `debug` is on. Raises as the calls do."""
    debug = take_more(call, more)
    lm = target_of(target)
    check_drafters(lm, drafters, tokenizer)
    return lm, stop_ids_of(*ends, target, tokenizer), debug


def _drain(
    lm: LM,
    input_ids: Ids,
    drafter: Drafter,
    sampler: Sampler,
    max_gen_len: int,
    stop: frozenset[int],
    gamma: int,
    debug: bool,
) -> tuple[list[int], float]:
    """Check the numbers of a call; return the new ids, and accepted / drafted."""
    pace = FixedPace(whole("gamma", gamma, 0, "a whole number, at least 0"))
    limits = Limits(whole("max_gen_len", max_gen_len, 1, "a whole number, at least 1"), stop)
    events = _logged(generate(lm, [prompt_ids(input_ids)], drafter, sampler, limits, pace=pace), debug)
    steps = [event for event in events if isinstance(event, Step)]
    accepted, drafted = sum(len(step.path) for step in steps), sum(len(step.drafted) for step in steps)
    return [token for step in steps for token in step.emitted], accepted / drafted if drafted else 0.0


def _logged(events: Iterator[Event], debug: bool) -> Iterator[Event]:
    """Yield the events; log every round if `debug` is on."""
    rounds = count()
    for event in events:
        if debug and isinstance(event, Step):
            drafted, accepted = list(event.drafted), list(event.accepted)
            _log.info("round %d: drafted %s, accepted %s, then %s", next(rounds), drafted, accepted, event.token)
        elif debug and isinstance(event, BeamStep):
            beams = [f"{beam.parent}+{beam.token} {beam.fate}" for beam in event.beams]
            _log.info("round %d: %s", next(rounds), ", ".join(beams))
        yield event


@also_as(_PLAIN_ORDER, model="target")
def autoregressive_generate_encoder_decoder(input_ids: Ids, target: HfModel | LM, **arguments: Any) -> list[int]:
    """Plain decoding with an encoder-decoder model: one pass of the encoder, one of the decoder a token.

    `input_ids` are the encoder's, with the end token that its tokenizer adds; `arguments` are those of
    :func:`sampling.api.autoregressive_generate`.

    Returns:
        The new ids, without the decoder's start token, the stop id included.

    Raises:
        UserError: `target` is no encoder-decoder model, or an argument cannot be used.
    """
    _check("target", target)
    return autoregressive_generate(input_ids, target, **arguments)


@also_as(_SPEC_ORDER)
def speculative_generate_encoder_decoder(
    input_ids: Ids, drafter: HfModel | Drafter, target: HfModel | LM, tokenizer: HfTokenizer = None, **arguments: Any
) -> tuple[list[int], float]:
    """Speculative decoding of an encoder-decoder model with a smaller one, each with its own encoder, run once.

    `arguments` are those of :func:`sampling.api.speculative_generate`.

    Returns:
        The new ids, without the decoder's start token, and accepted / drafted (0.0 if nothing was drafted).

    Raises:
        UserError: one of the two is no encoder-decoder model, or an argument cannot be used.
    """
    _check("target", target)
    _check("drafter", drafter)
    return speculative_generate(input_ids, drafter, target, tokenizer, **arguments)


def _check(role: str, model: HfModel) -> None:
    if not is_encoder_decoder(model):
        raise UserError(f"{role} must be an encoder-decoder model, got {type(model).__name__}")


@also_as("input_ids model max_gen_len num_beams top_k min_length alpha eos_tokens_id pad_token_id debug tokenizer")
def beam_search_generate(
    input_ids: Ids,
    model: HfModel,
    *,
    num_beams: int = 4,
    top_k: int = 0,
    min_length: int = 0,
    alpha: float = 1.2,
    max_gen_len: int = 100,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    tokenizer: HfTokenizer = None,
    logits_processor: LogitsProcessor | None = None,
    early_stopping: EarlyStopping = False,
    penalty_offset: float = 5.0,
    seed: Seed = 0,
    **more: Any,
) -> list[int]:
    """Return the best answer of a beam search: score = Σ log p / ((m + len) / (m + 1))^α.

    Args:
        input_ids: the prompt, at least one id.
        model: a transformers model, causal or encoder-decoder, a :class:`sampling.types.Network`, or any
            :class:`sampling.types.LM`.
        num_beams, top_k, min_length, alpha, early_stopping: see :class:`sampling.beam.BeamPlan`.
        max_gen_len: the most new ids.
        end_tokens_id: an id or several that end an answer (`eos_tokens_id` is the same). None: the model's own (and the
            tokenizer's, if given).
        pad_token_id: accepted for compatibility; nothing is padded.
        logits_processor: log p is that of its distribution; None or a greedy one: the model's own.
        penalty_offset: m. With 0, α is transformers' `length_penalty`.
        seed: as in every call; nothing is drawn here.
        more: as in :func:`autoregressive_generate`; `debug=True` logs the candidates of every step, each as its parent
            beam + its token.

    Returns:
        The new ids, the stop id included.

    Raises:
        UserError: an argument that cannot be used, in one line. TypeError: an unknown keyword.
    """
    lm, stop, debug = _prepared(beam_search_generate, more, model, [], tokenizer, (end_tokens_id, eos_tokens_id))
    processor = sampler_of(logits_processor, seed).processor
    plan = BeamPlan(num_beams, top_k, min_length, alpha, penalty_offset, early_stopping)
    limits = Limits(whole("max_gen_len", max_gen_len, 1, "a whole number, at least 1"), stop)
    tree = BeamTree()
    for event in _logged(beam_generate(lm, [prompt_ids(input_ids)], limits, plan, processor=processor), debug):
        if isinstance(event, BeamStep):
            tree.add(event)
    tree.close()
    return list(tree.best.tokens)
