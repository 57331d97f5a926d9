"""ColossalAI's inference engine as its callers know it, over :class:`sampling.engine.Engine`.

`InferenceEngine(model, tokenizer, InferenceConfig(…))` takes ColossalAI's arguments and answers as it does, with texts
that begin with their prompts. Settings of kernels, number types, memory (StreamingLLM's too) and processes are accepted
without effect; the logger `sampling` names them once. Other settings that cannot be honoured are refused by name. Knows
no serving: the next `generate` decodes every waiting request.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from sampling.api import Seed
from sampling.engine import ALLOWED, Engine, Figures, Prompts, listed, read_config
from utils.errors import UserError, did_you_mean, shown, whole
from utils.objects import HfTokenizer, Json

_UNUSED = (
    *("dtype", "kv_cache_dtype", "prefill_ratio", "pad_input", "early_stopping", "glimpse_large_kv", "block_size"),
    *("tp_size", "pp_size", "micro_batch_size", "micro_batch_buffer_size", "use_cuda_kernel", "high_precision"),
    *("use_cuda_graph", "max_context_len_to_capture", "enable_streamingllm", "start_token_size"),
    *("generated_token_size", "patched_parallelism_size", "use_spec_dec"),
)
_NAMED = {"llama": "llama-2", "vicuna": "vicuna"}  # prompt templates → utils/catalogue/templates.py
_REFUSED = {"beam_width": 1, "forced_eos_token_id": None}  # with the one value that is accepted

_log = logging.getLogger("sampling")
said_unused: set[str] = set()  # the names that `say_unused` has warned of in this process


def say_unused(names: Sequence[str]) -> None:
    """Warn once of each name that it changes nothing."""
    new = [name for name in names if name not in said_unused]
    said_unused.update(new)
    if new:
        _log.warning("%s: taken, %s nothing here", ", ".join(new), "changes" if len(new) == 1 else "change")


class InferenceConfig:
    """The settings of ColossalAI's record of the same name.

    Args:
        max_batch_size: the most prompts that are decoded together.
        max_output_len: the most new tokens, unless a generation config has its own.
        max_input_len: the most tokens of a prompt.
        prompt_template: "llama", "vicuna", "baichuan", or a text with {input_text}; None: prompts as they are.
        do_sample, top_k, top_p, temperature, no_repeat_ngram_size, repetition_penalty: as transformers means them.
        ignore_eos: write all `max_output_len` tokens, past end tokens.
        max_n_spec_tokens: the most tokens that a round may draft.
        unused: its other settings; they change nothing, and each is warned of once. Beams and forced end tokens are
            refused.

    Raises:
        UserError: a value that cannot be honoured. TypeError: an unknown name.
    """

    def __init__(
        self,
        max_batch_size: int = 8,
        max_output_len: int = 256,
        max_input_len: int = 256,
        *,
        prompt_template: str | None = None,
        do_sample: bool = False,
        top_k: int | None = 50,
        top_p: float | None = 1.0,
        temperature: float | None = 1.0,
        no_repeat_ngram_size: int | None = 0,
        repetition_penalty: float | None = 1.0,
        ignore_eos: bool = False,
        max_n_spec_tokens: int = 5,
        **unused: Any,
    ) -> None:
        self.max_batch_size = whole("max_batch_size", max_batch_size, 1, ALLOWED)
        self.max_output_len = whole("max_output_len", max_output_len, 1, ALLOWED)
        self.max_input_len = whole("max_input_len", max_input_len, 1, ALLOWED)
        template = {"baichuan": " <reserved_106> {input_text} <reserved_107> "}.get(
            prompt_template or "", prompt_template
        )
        if template is not None and template not in _NAMED and "{input_text}" not in template:
            raise UserError(
                f"prompt_template must be llama, vicuna, baichuan or hold {{input_text}}, got {shown(template)}"
            )
        self.prompt_template, self.ignore_eos, self.max_n_spec_tokens = template, ignore_eos, max_n_spec_tokens
        self.generation: Json = {
            "do_sample": do_sample,
            "top_k": top_k,
            "top_p": top_p,
            "temperature": temperature,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "repetition_penalty": repetition_penalty,
            "max_new_tokens": self.max_output_len,
        }
        for name, value in unused.items():
            if name not in _UNUSED and name not in _REFUSED:
                hint = did_you_mean(name, [*self.generation, *vars(self), *_UNUSED])
                raise TypeError(f"InferenceConfig() got an unexpected keyword argument '{name}'{hint}")
            if name in _REFUSED and value != _REFUSED[name]:
                raise UserError(f"InferenceConfig: {name}={shown(value)} cannot be honoured here: leave it out")
            setattr(self, name, value)
        say_unused([name for name in unused if name in _UNUSED])


class InferenceEngine(Engine):
    """A model with its tokenizer that answers lists of prompts, drafting where a drafter is enabled.

    Args:
        model_or_path: a loaded transformers causal model.
        tokenizer: its tokenizer; nothing is padded.
        inference_config: an :class:`InferenceConfig`; its defaults if None.
        verbose: the figures of every `generate` go to the logger `sampling`, level INFO.
        model_policy: changes nothing here.

    Attributes:
        last: the figures of the last `generate`, of all its prompts together.
        generation_config: the config of a `generate` without one: that of the last call that had one, at first that of
            `inference_config`.

    Raises UserError without a tokenizer.
    """

    def __init__(
        self,
        model_or_path: Any,
        tokenizer: HfTokenizer = None,
        inference_config: InferenceConfig | None = None,
        verbose: bool = False,
        model_policy: Any = None,
    ) -> None:
        if tokenizer is None:
            raise UserError("InferenceEngine needs the model's tokenizer: InferenceEngine(model, tokenizer, …)")
        self.inference_config = config = inference_config or InferenceConfig()
        template = _NAMED.get(config.prompt_template or "", "plain")
        super().__init__(model_or_path, tokenizer, config.max_n_spec_tokens, template=template)
        self.verbose = verbose
        self.generation_config: Any = config.generation
        self._waiting: list[tuple[int, list[int]]] = []
        self._numbers = count()
        say_unused(["model_policy"] if model_policy is not None else [])

    def add_request(
        self,
        request_ids: int | Sequence[int] | None = None,
        prompts: Prompts | None = None,
        prompts_token_ids: Any = None,
    ) -> None:
        """Queue prompts for the next `generate`; UserError for none, one too long, or ids outside the vocabulary."""
        self._waiting += self._requests(request_ids, prompts, prompts_token_ids)

    def _requests(
        self, request_ids: int | Sequence[int] | None, prompts: Prompts | None, prompts_token_ids: Any
    ) -> list[tuple[int, list[int]]]:
        """Return the prompts as ids, with their numbers."""
        given = prompts if prompts_token_ids is None else prompts_token_ids
        if given is None:
            raise UserError("add_request needs prompts or prompts_token_ids")
        rows = [self._row(prompt, number) for number, prompt in enumerate(listed(given), 1)]
        names = [request_ids] if isinstance(request_ids, int) else request_ids
        if names is not None and len(names) != len(rows):
            raise UserError(f"request_ids must be one a prompt, got {len(names)} for {len(rows)}")
        return list(zip(names or [next(self._numbers) for _ in rows], rows, strict=True))

    def generate(  # type: ignore[override]
        self,
        request_ids: int | Sequence[int] | None = None,
        prompts: Prompts | None = None,
        prompts_token_ids: Any = None,
        return_token_ids: bool = False,
        generation_config: Any = None,
        *,
        seed: Seed = 0,
    ) -> Any:
        """Answer these prompts and the queued ones, in the order of their request ids.

        Args:
            request_ids: a number a prompt; in the order given if None.
            prompts: a text or several.
            prompts_token_ids: lists of ids, or a tensor [n, tokens], instead.
            return_token_ids: return also the new ids.
            generation_config: as in :meth:`sampling.engine.Engine.generate`; later calls keep it.
            seed: as in :func:`sampling.autoregressive_generate`.

        Returns:
            A text for each prompt, which begins with the prompt; with `return_token_ids` the texts and the new ids.

        Raises:
            UserError: an unusable argument. The queue and the earlier config stay.
        """
        given = self.generation_config if generation_config is None else generation_config
        config = read_config(given)
        if self.inference_config.ignore_eos:
            config = replace(config, stop=[])
        requests = list(self._waiting)
        if prompts is not None or prompts_token_ids is not None:
            requests += self._requests(request_ids, prompts, prompts_token_ids)
        rows = [row for _, row in sorted(requests, key=lambda request: request[0])]
        answers: list[list[int]] = []
        figures = Figures()
        for start in range(0, len(rows), self.inference_config.max_batch_size):
            batch = rows[start : start + self.inference_config.max_batch_size]
            answers += super().generate(batch, config, return_token_ids=True, seed=seed)[1]
            figures += self.last
        self.last, self.generation_config, self._waiting = figures, given, []
        if self.verbose and rows:
            _log.info("%d prompts: %s, alpha %.2f", len(rows), figures, figures.acceptance_rate)
        whole_rows = [[*row, *ids] for row, ids in zip(rows, answers, strict=True)]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in whole_rows]
        return (texts, answers) if return_token_ids else texts

    def _row(self, prompt: Any, number: int) -> list[int]:
        template = self.inference_config.prompt_template
        if isinstance(prompt, str) and template is not None and template not in _NAMED:
            prompt = template.replace("{input_text}", prompt)  # other braces are text
        row, most = self.ids_of(prompt, number), self.inference_config.max_input_len
        if len(row) > most:
            raise UserError(f"prompt {number} is {len(row)} tokens, max_input_len is {most}")
        self.check([row])
        return row


class GlideLlamaForCausalLM:
    """A published GLIDE drafter by its name; `enable_spec_dec` loads it for its target."""

    @staticmethod
    def from_pretrained(name: str | Path) -> str | Path:
        """Return the folder or hub id itself."""
        return name


def launch_from_torch(**unused: Any) -> None:
    """Do nothing: one process decodes (docs/several-processes.md for several)."""
