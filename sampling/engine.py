"""An engine: a model that keeps its drafter, for many prompts at a time; a thin layer over the decode loop.

For callers who come from serving engines: load once, switch speculative decoding on and off, pass a list of prompts
and a generation config, transformers' own or a dict of its names. A setting that cannot be honoured is refused by name;
settings that change no text are accepted. The given tokenizer turns prompts into ids and ids into texts; chat templates
are those of utils/catalogue/templates.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sampling.api import Seed, check_drafters, drafter_of, prompt_ids, sampler_of, stop_ids_of, target_of
from sampling.drafters.draft_heads.checkpoint import head_of, load_student
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.events import Step
from sampling.loop import generate, room_of
from sampling.models.causal import CausalLM
from sampling.rows import first_rows
from sampling.types import Drafter, FixedPace, Limits, Rows
from utils.catalogue.templates import carries_template, check_template, end_ids, render
from utils.errors import UserError, nearest, raise_first, shown, whole
from utils.loading.fit import fingerprint
from utils.logits_processors import Bias, LogitsProcessor, make_processor
from utils.objects import HfModel, HfTokenizer, Json
from utils.tokenizer import first_ids

NEW_TOKENS = 128  # if the config has no length

_HONOURED = (
    *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("sequence_bias", "bad_words_ids", "suppress_tokens", "max_new_tokens", "max_length", "eos_token_id"),
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # values that change nothing; None never does
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "top_h"), (1, 1.0)),
    **dict.fromkeys(("encoder_repetition_penalty", "length_penalty", "guidance_scale"), (1, 1.0)),
    **dict.fromkeys(("min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0, 0.0)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "penalty_alpha", "prompt_lookup_num_tokens"), (0, 0.0)),
    **dict.fromkeys(("early_stopping", "renormalize_logits", "remove_invalid_values", "token_healing"), (False,)),
    **dict.fromkeys(("use_mtp", "low_memory", "output_attentions", "output_hidden_states"), (False,)),
    **dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), (False,)),
}
_WITHOUT_EFFECT = (
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    # of transformers' own speculative decoding, which is not used
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "speculation_type"),
)

ALLOWED = "a whole number, at least 1"


@dataclass(frozen=True)
class EngineConfig:
    """The settings of a generation config. `max_length` counts the prompt; `max_new_tokens` does not, and wins."""

    processor: LogitsProcessor
    max_new_tokens: int | None
    max_length: int | None
    stop: Any  # an id, several, or None

    def new_tokens(self, prompt: int) -> int:
        """Return the most new ids after prompts of up to `prompt` tokens. UserError if max_length leaves none."""
        if self.max_new_tokens is not None or self.max_length is None:
            return NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens
        if self.max_length <= prompt:
            raise UserError(
                f"max_length must be above the {prompt} tokens of the longest prompt, got {self.max_length}"
            )
        return self.max_length - prompt


def read_config(given: Any) -> EngineConfig:
    """Read a GenerationConfig, a dict of its names, or a model that has one; return an EngineConfig as it is.

    Raises UserError for settings that cannot be honoured, unknown names in a dict, and values outside their range.
    """
    if isinstance(given, EngineConfig):
        return given
    given = getattr(given, "generation_config", given)
    given = given.to_dict() if hasattr(given, "to_dict") else given
    if not isinstance(given, Mapping):
        raise UserError(f"generation_config must be a GenerationConfig or a dict, got {shown(given)}")
    values = {name: value for name, value in given.items() if value is not None and not name.startswith("_")}
    for name, value in values.items():
        known = name in _HONOURED or name in _WITHOUT_EFFECT
        if not known and not any(value == neutral for neutral in _NEUTRAL.get(name, ())):
            near = None if name in _NEUTRAL else nearest(name, _HONOURED)
            hint = f"did you mean {near}?" if near else "leave it out"
            raise UserError(f"generation_config: {name}={shown(value)} cannot be honoured here: {hint}")
    sampled = values.get("do_sample", False)
    if not isinstance(sampled, bool):
        raise UserError(f"do_sample must be True or False, got {shown(sampled)}")
    lengths = {
        name: whole(name, values[name], 1, ALLOWED) if name in values else None
        for name in ("max_new_tokens", "max_length")
    }
    return EngineConfig(_processor(values, sampled), **lengths, stop=values.get("eos_token_id"))


def _processor(values: Json, sampled: bool) -> LogitsProcessor:
    """Return the processor of these settings: greedy unless `do_sample`, then with transformers' defaults, temperature
    1 and top-k 50."""
    rules: Json = {
        "repetition_penalty": values.get("repetition_penalty", 1.0),
        "no_repeat_ngram": values.get("no_repeat_ngram_size", 0),
        "logit_bias": _bias(values),
    }
    if not sampled:
        return make_processor(0.0, **rules)
    numbers: Json = {"temperature": 1.0, "top_k": 50}
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    return LogitsProcessor(**numbers | {name: values[name] for name in names if name in values}, **rules)


def _bias(values: Json) -> Bias:
    """Return transformers' `sequence_bias`, `bad_words_ids` and `suppress_tokens` as one bias. UserError for values of
    another form."""
    given = values.get("sequence_bias", {})
    try:
        bias = {tuple(ids): amount for ids, amount in (given.items() if isinstance(given, Mapping) else given)}
        words = [tuple(ids) for ids in values.get("bad_words_ids", ())]
        bias |= {ids: -math.inf for ids in words if ids != (values.get("eos_token_id"),)}
        return bias | {(token,): -math.inf for token in values.get("suppress_tokens", ())}
    except (TypeError, ValueError):
        names = [name for name in ("sequence_bias", "bad_words_ids", "suppress_tokens") if name in values]
        raise UserError(f"{' or '.join(names)}: lists of ids are needed, as transformers takes them") from None


Prompts = str | Sequence[Any]  # a text, or texts, messages or lists of ids


def listed(prompts: Prompts) -> list[Any]:
    """Return the prompts as a list; a text is one prompt. UserError for anything but a text or several prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        raise UserError(f"prompts must be a text, or a list of texts, messages or ids, got {shown(prompts)}")
    return list(prompts)


@dataclass(frozen=True)
class Figures:
    """Figures of a `generate`, summed over its prompts: tokens drafted and accepted, target passes of each prompt
    (opening rounds included; a pass over a batch counts for each of its prompts), new tokens."""

    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    tokens: int = 0

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def acceptance_rate(self) -> float:
        """Return accepted / drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Engine:
    """A model with its tokenizer and, if enabled, a drafter.

    Args:
        model: a transformers causal model.
        tokenizer: its tokenizer; it needs no pad token, nothing is padded.
        max_n_spec_tokens: the most tokens that a round may draft.
        template: a chat template by name (utils/catalogue/templates.py). "auto": the tokenizer's own, and without one
            prompts as they are; "plain": prompts as they are.

    Attributes:
        last: the figures of the last `generate`.
        use_spec_dec: whether `generate` drafts.
        glide_offset: added to the positions of a GLIDE drafter's drafts, 0 or more; read by
            `enable_spec_dec`. The paper's is 0, ColossalAI's engine adds the number of drafted tokens.
    """

    def __init__(
        self, model: HfModel, tokenizer: HfTokenizer, max_n_spec_tokens: int = 5, *, template: str = "auto"
    ) -> None:
        self.max_n_spec_tokens = whole("max_n_spec_tokens", max_n_spec_tokens, 1, ALLOWED)
        self.model, self.tokenizer, self.template = model, tokenizer, check_template(template)
        self.last = Figures()
        self.glide_offset = 0
        self._lm = target_of(model)
        self._drafter: Drafter | None = None
        self._n_spec_tokens = self.max_n_spec_tokens
        self.use_spec_dec = False

    def enable_spec_dec(
        self, drafter: HfModel | Drafter = None, n_spec_tokens: int | None = None, use_glide_drafter: bool = False
    ) -> None:
        """Draft with `drafter`: a transformers model, a drafter object, or a GLIDE drafter.

        Args:
            drafter: None takes the drafter from before `disable_spec_dec`.
            n_spec_tokens: tokens drafted a round, at most `max_n_spec_tokens` (which None means).
            use_glide_drafter: `drafter` is a GLIDE drafter, which reads this model's keys and values: a folder, a hub
                id, a loaded module with the published weight names, a `DraftHead` (a "student" in errors) or its LM.

        Raises:
            UserError: no drafter, one that does not fit, or too many tokens; nothing changes then.
        """
        count = self.max_n_spec_tokens if n_spec_tokens is None else whole("n_spec_tokens", n_spec_tokens, 1, ALLOWED)
        raise_first(
            {
                f"n_spec_tokens must be at most max_n_spec_tokens, {self.max_n_spec_tokens}, got {count}": (
                    count > self.max_n_spec_tokens
                ),
                "no drafter is set: enable_spec_dec(drafter) sets one": drafter is None and self._drafter is None,
            },
            UserError,
        )
        if drafter is not None:
            built = self._glide(drafter) if use_glide_drafter else drafter_of(drafter)
            check_drafters(self._lm, [built], self.tokenizer)
            self._drafter = built
        self._n_spec_tokens, self.use_spec_dec = count, True

    def disable_spec_dec(self) -> None:
        """Decode plainly; the drafter is kept for `enable_spec_dec()`."""
        self.use_spec_dec = False

    def clear_spec_dec(self) -> None:
        """Decode plainly and let the drafter go."""
        self.use_spec_dec, self._drafter = False, None

    def generate(
        self,
        prompts: Prompts,
        generation_config: Any = None,
        *,
        return_token_ids: bool = False,
        seed: Seed = 0,
    ) -> Any:
        """Answer all prompts, decoded as one batch of ragged rows.

        Args:
            prompts: texts; or, for each, a list of chat messages or of token ids. One text alone is a batch of one.
            generation_config: transformers' GenerationConfig, or a dict of its names; the model's own if None. Settings
                that cannot be honoured are refused by name.
            return_token_ids: return also the new ids.
            seed: as in :func:`sampling.autoregressive_generate`; greedy decoding needs none.

        Returns:
            A text for each prompt; with `return_token_ids` the texts and the lists of new ids. `last` has the figures.

        Raises:
            UserError: no prompts, a value that is no prompt, a prompt that is too long, or a setting that cannot be
                honoured.
        """
        config = read_config(self.model if generation_config is None else generation_config)
        rows = [self.ids_of(prompt, number) for number, prompt in enumerate(listed(prompts), 1)]
        if not rows:
            raise UserError("prompts holds no prompt: give at least one")
        stop = stop_ids_of(config.stop, None, self.model, self.tokenizer) | end_ids(self.tokenizer, self.template)
        limits = Limits(config.new_tokens(max(map(len, rows))), stop)
        drafter: Drafter = self._drafter if self.use_spec_dec and self._drafter is not None else NoDrafter()
        pace = FixedPace(self._n_spec_tokens if drafter.traits.most is None else drafter.traits.most)
        answers: list[list[int]] = [[] for _ in rows]
        self.last = Figures()
        for event in generate(self._lm, rows, drafter, sampler_of(config.processor, seed), limits, pace=pace):
            if isinstance(event, Step):
                answers[event.row].extend(event.emitted)
                self.last += Figures(len(event.drafted), len(event.path), 1, len(event.emitted))
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        texts = [self.tokenizer.decode(ids, **how) for ids in answers]
        return (texts, answers) if return_token_ids else texts

    def check(self, rows: Rows) -> None:
        """Raise UserError for prompts that are too long for the model's context, or have ids outside its vocabulary."""
        room_of(self._lm, first_rows(rows, self._lm.open(rows)), Limits(1))

    def ids_of(self, prompt: Any, number: int) -> list[int]:
        """Return the ids of prompt `number`, which is a text (a user's message if there is a template), messages, or
        ids. UserError for messages without a template, and for any other prompt."""
        messages = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], dict)
        templated = carries_template(self.tokenizer, self.template)
        if messages and not templated:
            raise UserError("chat messages need a chat template: name one (Engine(…, template='chatml'))")
        if messages or (isinstance(prompt, str) and templated):
            chat = list(prompt) if messages else [{"role": "user", "content": prompt}]
            text = render(self.tokenizer, chat, self.template)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return prompt_ids(first_ids(self.tokenizer, prompt) if isinstance(prompt, str) else prompt, f"prompt {number}")

    def _glide(self, drafter: HfModel) -> Drafter:
        """Return the drafter of a GLIDE head: of an LM, a `DraftHead`, another module, a folder, or a hub id."""
        if isinstance(drafter, GlideLM):
            return ModelDrafter(drafter)
        student = drafter
        if isinstance(drafter, str | Path):
            student = load_student(_folder(drafter), self.model, fingerprint(self.tokenizer))
        elif isinstance(drafter, nn.Module) and not isinstance(drafter, DraftHead):
            student = head_of(drafter, self.model)
        if not isinstance(student, DraftHead):
            raise UserError(f"a GLIDE drafter is a GlideLM, a module, a folder or a hub id, got {shown(drafter)}")
        if not isinstance(self._lm, CausalLM):
            raise UserError(f"a GLIDE drafter reads keys and values, and {self._lm.name} has none")
        offset = whole("glide_offset", self.glide_offset, 0, "a whole number, at least 0")
        return ModelDrafter(GlideLM(student, self._lm.network.layers, offset=offset))


def _folder(name: str | Path) -> Path:
    """Return the folder itself, or that of a hub id in the hub's cache, fetched if it is missing."""
    text = str(name)
    if Path(text).is_dir() or text.count("/") != 1 or text.startswith((".", "~", "/")):
        return Path(text)
    from utils.loading.fetch import hub_folder

    return hub_folder(text, None, False)
