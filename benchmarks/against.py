"""Times other programs on the same prompts, in turns with our lanes: transformers, llama.cpp, onnxruntime-genai.

    python benchmarks/against.py --programs transformers[:DRAFTER],llama.cpp,onnxruntime-genai [flags of infer.py bench]

Requirements, beside requirements.txt: pip install llama-cpp-python onnxruntime-genai onnx-ir

Every program gets the prompt's ids, computes with as many threads as torch and begins with an empty cache. One clock
times them all (:class:`Arrivals`): the first tokens that arrive end the time to first token, the rate counts the later
ones. The table's last column is the share of greedy tokens that the target in float32 would have chosen after the same
ids.

* hf-plain, hf-lookup, hf-assisted: transformers' `generate` of a plain copy of the target; without drafts, with
  `prompt_lookup_num_tokens=10`, and with a drafter model (or a plain draft head) as `assistant_model`.
* llama-plain, llama-lookup: `llama-cpp-python` on the target's own GGUF file, without drafts and with its own prompt
  lookup (its default: 10 tokens after a match of 2).
* ort-int8, ort-int4, with -ngram too: `onnxruntime-genai` on what its own model builder makes of the target's float32
  weights: blocks of 32, accuracy level 4 (8-bit activations); without drafts and with its n-gram drafts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import copy
import hashlib
import importlib
import importlib.util
import json
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from operator import eq
from statistics import fmean, median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from app.bench.run import Bench
from app.bench.summary import Timed, times
from app.command_line.arguments import read_request
from app.command_line.main import layers_of
from app.lanes.answers import Answer, Variant
from app.lanes.pairing import load_options, with_drafter
from app.prompts.questions import selected
from app.screen.output import load_engine, load_progress, print_table, screen, small_table
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.stats.summary import Stats
from utils.errors import UsageError, UserError
from utils.files import write_json
from utils.machine import machine
from utils.progress import INTERRUPTED, Cancelled

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine
    from sampling.drafters.draft_heads.modules import DraftHead
    from utils.loading.loaded import LoadedPair, LoadOptions
    from utils.progress import Progress


TRANSFORMERS, LLAMA_CPP, ONNXRUNTIME = "transformers", "llama.cpp", "onnxruntime-genai"
PLAIN, LOOKUP, ASSISTED = "hf-plain", "hf-lookup", "hf-assisted"
LOOKUP_TOKENS = 10
PACKAGES = {  # the modules that are imported, and the package that holds them
    LLAMA_CPP: (("llama_cpp",), "llama-cpp-python (pip builds it for this machine, which takes minutes)"),
    ONNXRUNTIME: (("onnxruntime_genai", "onnx_ir"), "onnxruntime-genai onnx-ir"),
}
PRECISIONS = ("int8", "int4")
BLOCK, ACCURACY = 32, 4
NGRAM = {"ngram_size": 3}  # and by default 4 tokens after a match
LEAST_ROOM = 1024  # tokens of llama.cpp's first context


class StoppedError(Exception):
    """Raised inside a rival's answer, to end it after an interrupt."""


class Arrivals:
    """Records when tokens arrive: their ids, the number of tokens of each pass (`runs`), and the times in seconds."""

    def __init__(self, interrupt: Callable[[], bool]) -> None:
        self.ids: list[int] = []
        self.runs: list[int] = []
        self.times: list[float] = []
        self.started = 0.0
        self.interrupted = interrupt

    def begin(self) -> None:
        """Start the clock, before the prompt is read."""
        self.started = time.perf_counter()

    def add(self, ids: Sequence[int], *, more: bool = False) -> None:
        """Record tokens that arrive now; `more`: from the same pass as the last ones. StoppedError after an
        interrupt."""
        self.times.append(time.perf_counter())
        self.ids += ids
        if more and self.runs:
            self.runs[-1] += len(ids)
        else:
            self.runs.append(len(ids))
        if self.interrupted():
            raise StoppedError

    def notes(self) -> dict[str, Any]:
        """Return the records for another process."""
        return {name: value for name, value in vars(self).items() if name != "interrupted"}

    def stats(self, prompt_n: int, reason: Any) -> Stats:
        """Return the figures of an answer; rates leave out the tokens of the first pass."""
        first = 1000 * (self.times[0] - self.started) if self.times else None
        return Stats(
            stop_reason=reason,
            prompt_n=prompt_n,
            prompt_ms=first or 0.0,
            ttft_ms=first,
            predicted_n=len(self.ids),
            predicted_ms=1000 * (self.times[-1] - self.times[0]) if self.times else 0.0,
            target_passes=max(0, len(self.runs) - 1),
            openings=self.runs[0] if self.runs else 0,
        )


@dataclass
class Rival(ABC):
    """One way in which another program decodes. `another`: its arithmetic is not ours, so texts may differ."""

    name: str
    stop_ids: frozenset[int]
    context: int

    another: ClassVar[bool] = True
    hears: ClassVar[type[Arrivals]] = Arrivals

    @abstractmethod
    def say(self, prompt: list[int], settings: Settings, limit: int, arrivals: Arrivals) -> None:
        """Decode up to `limit` tokens, a stop token included, into `arrivals`, and start their clock."""

    def answer(
        self,
        prompt: Sequence[int],
        settings: Settings,
        decode: Callable[[list[int]], str],
        interrupt: Callable[[], bool],
    ) -> Answer:
        """Decode one prompt, with an empty cache. Sampled answers repeat with the seed; they are other draws than our
        lanes'."""
        arrivals, interrupted = self.hears(interrupt), False
        try:
            self.say(list(prompt), settings, min(settings.max_new_tokens, self.context - len(prompt)), arrivals)
        except StoppedError:
            interrupted = True
        ended = "eos" if arrivals.ids and arrivals.ids[-1] in self.stop_ids else "length"
        stats, ids = arrivals.stats(len(prompt), "interrupted" if interrupted else ended), tuple(arrivals.ids)
        differs = self.another or settings.temperature > 0
        return Answer(self.name, ids, decode(list(ids)), stats, may_differ=differs)


def check_installed(program: str, settings: Settings) -> None:
    """Raise UsageError, before any work, if a program's package is missing, or if it lacks a rule of the settings."""
    modules, package = PACKAGES.get(program, ((), ""))
    if any(name not in sys.modules and importlib.util.find_spec(name) is None for name in modules):
        raise UsageError(f"{program} needs a package that is not here: pip install {package}")
    rules: dict[str, Any] = {
        "repetition_penalty": settings.repetition_penalty != 1,
        "no_repeat_ngram": settings.no_repeat_ngram,
    }
    rules |= {"min_p": settings.temperature and settings.min_p} if program == ONNXRUNTIME else {}
    for name in (name for name, given in rules.items() if given and modules):
        raise UsageError(f"{program} has no rule like our --{name.replace('_', '-')}: leave one of them out")


# -- transformers -------------------------------------------------------------------------------------


class Streamer(Arrivals):
    """Receives the tokens of `generate`."""

    def begin(self) -> None:
        super().begin()
        self._prompt = True

    def put(self, tokens: Any) -> None:
        """Tokens [1, n] or [1]; the first call brings the prompt."""
        if not self._prompt:
            self.add(tokens.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """Do nothing: no token is held back."""


@dataclass
class Generate(Rival):
    """One way of calling `generate` of `model` (a plain transformers model); `more` are its arguments."""

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
        """Return the argument that bans the head's rows without a token, which our lanes leave out too."""
        surplus = range(self.vocab_size, self.model.config.get_text_config().vocab_size)
        return {"suppress_tokens": list(surplus)} if surplus else {}


def sampling_of(settings: Settings) -> dict[str, Any]:
    """Return the settings' distribution as arguments of `generate`, which applies them in our order."""
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
    """Return transformers' ways to decode, by name, and notes on those that are left out.

    `against` is `transformers`, or `transformers:DRAFTER` with the drafter (a plain draft head or a transformers model)
    that hf-assisted gets instead of the pair's own (or, where that is of another kind, the pair's plain draft head).
    Raises UserError for a drafter that cannot be loaded or does not fit.
    """
    from utils.kernels.quantized_linear import unpacked_copy

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


def without_defaults(model: Any, stop_ids: frozenset[int]) -> Any:
    """Return a copy of `model` over the same weights, whose generation configuration only says where an answer ends."""
    twin = copy.copy(model)
    twin.generation_config = bare_config(stop_ids, getattr(model.generation_config, "decoder_start_token_id", None))
    return twin


def bare_config(stop_ids: frozenset[int], start_id: int | None) -> Any:
    """Return a configuration of `generate` with the ids that end an answer and the first id of a decoder alone."""
    from transformers import GenerationConfig

    stop = sorted(stop_ids)
    ends: dict[str, Any] = {"eos_token_id": stop or None, "pad_token_id": stop[0] if stop else 0}
    return GenerationConfig(**ends, decoder_start_token_id=start_id)  # type: ignore[no-untyped-call]


def _other(engine: PairEngine, options: ModelOptions, drafter: str) -> LoadedPair:
    """Return the pair with this drafter. UsageError if `generate` cannot use this kind of drafter."""
    from utils.loading.loading import load_drafter

    pair = load_drafter(engine.loaded, with_drafter(engine.loaded.spec, drafter), load_options(options))
    if pair.drafter_word not in ("model", "plain"):
        raise UsageError(
            f"--programs {TRANSFORMERS}:{drafter}: transformers has no {pair.drafter_word} drafter, "
            "name a model or a plain one"
        )
    return pair


def _assistant(pair: LoadedPair, engine: PairEngine) -> Any:
    """Return the drafter of `pair` (else its plain draft head) as a transformers model, or why there is none."""
    from utils.kernels.quantized_linear import unpacked_copy

    if pair.drafter is not None and pair.drafter_word == "model":
        theirs, ours = pair.drafter.vocab_size, pair.target.vocab_size
        if pair.drafter.vocabulary is not None:
            return f"the lane takes no drafter with other tokens than the target's, and {pair.drafter.name} has others"
        if theirs != ours:
            return f"transformers takes no drafter with another number of logits ({theirs:,}, the target's {ours:,})"
        return unpacked_copy(pair.drafter.model)
    folder = pair.draft_head if pair.drafter_word == "plain" else None
    if folder is None:
        try:
            folder = pair.spec.head_folder("plain")
        except UsageError:
            named = f"--programs {TRANSFORMERS}:DRAFTER names a model or a plain one"
            return f"transformers has no {pair.drafter_word} drafter ({named})"
    from sampling.drafters.draft_heads.checkpoint import load_student
    from utils.loading.fit import fingerprint

    student = load_student(folder, pair.target.model, fingerprint(engine.tokenizer))
    if short := student.config.short_list:
        return f"transformers takes no head over {short:,} of {student.config.vocab_size:,} ids"
    model: Any = llama_of(student)
    return model.to(pair.target.device, pair.target.dtype)


def llama_of(draft_head: DraftHead) -> Any:
    """Return a plain draft head as a Llama model of transformers, float32; tensors are shared where they can be.

    Its layers are Llama's, one to one, its vocabulary is the target's: no transformers configuration describes another.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = draft_head.config
    tensors = {name: value.detach().float() for name, value in draft_head.state_dict().items()}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    shape = LlamaConfig(
        **{name: getattr(config, name) for name in (*names, *more)},
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):  # no memory for parameters that are replaced
        model: Any = LlamaForCausalLM(shape)
    model.model.rotary_emb = LlamaRotaryEmbedding(shape)
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)


# -- llama.cpp ----------------------------------------------------------------------------------------


@dataclass
class LlamaCpp(Rival):
    """Decodes a GGUF file with llama-cpp-python. Its context is enlarged before the clock starts."""

    file: Path
    threads: int
    lookup: bool = False
    _llama: Any = field(default=None, init=False, repr=False)

    def say(self, prompt: list[int], settings: Settings, limit: int, arrivals: Arrivals) -> None:
        llama = self._with_room(len(prompt) + limit)
        llama.reset()  # else it continues from the common prefix with the last prompt
        llama.set_seed(settings.seed)
        drafter, calls = llama.draft_model, 0
        if drafter is not None:
            calls = drafter.calls
        arrivals.begin()
        for token in llama.generate(
            prompt, temp=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p
        ):
            before, calls = calls, 0 if drafter is None else drafter.calls
            arrivals.add([token], more=drafter is not None and calls == before)
            if token in self.stop_ids or len(arrivals.ids) >= limit:
                return

    def _with_room(self, tokens: int) -> Any:
        """Return the model with a context that takes `tokens` tokens."""
        if self._llama is None or self._llama.n_ctx() < tokens:
            package = importlib.import_module("llama_cpp")
            self._llama = None
            self._llama = package.Llama(
                str(self.file),
                n_ctx=min(self.context, max(LEAST_ROOM, 1 << (tokens - 1).bit_length())),
                n_threads=self.threads,
                n_threads_batch=self.threads,
                draft_model=_Counted() if self.lookup else None,
                logits_all=self.lookup,  # else its drafts fail after prompts of more than one batch
                verbose=False,
            )
        return self._llama


class _Counted:
    """llama-cpp-python's prompt lookup, and its number of `calls`: one before each pass but the first."""

    def __init__(self) -> None:
        self._lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding()
        self.calls = 0

    def __call__(self, input_ids: Any, /, **more: Any) -> Any:
        self.calls += 1
        return self._lookup(input_ids, **more)


@dataclass
class Apart(Rival):
    """:class:`LlamaCpp` in a separate process, which times itself and reports at the end.

    In our process it would run on torch's OpenMP threads, which infer.py lets spin only briefly, and lose a third of
    its speed. An interrupt ends the process; the next answer starts another.
    """

    file: Path
    threads: int
    lookup: bool = False
    _child: subprocess.Popen[str] | None = field(default=None, init=False, repr=False)

    def say(self, prompt: list[int], settings: Settings, limit: int, arrivals: Arrivals) -> None:
        sampling = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        if self._child is None:
            self.about(arrivals.interrupted)
        report = self._reply({"prompt": prompt, "limit": limit, "settings": sampling}, arrivals.interrupted)
        if "error" in report:
            raise UserError(f"llama.cpp cannot answer a prompt of {len(prompt)} tokens: {report['error']}")
        vars(arrivals).update(report)

    def about(self, interrupted: Callable[[], bool]) -> str:
        """Start the process; return its version, and what it was built with."""
        env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), CHILD],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        facts = {"stop_ids": [*self.stop_ids], "context": self.context, "file": str(self.file)}
        return str(self._reply({**facts, "threads": self.threads, "lookup": self.lookup}, interrupted))

    def _reply(self, request: dict[str, Any], interrupted: Callable[[], bool]) -> Any:
        """Return the process's answer to a line. UserError if it has ended, StoppedError after an interrupt."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        with ThreadPoolExecutor(1) as reader:
            try:
                child.stdin.write(json.dumps(request) + "\n")
                child.stdin.flush()
                line = reader.submit(child.stdout.readline)
                while not line.done():
                    wait([line], 0.1)
                    if interrupted() and not line.done():
                        raise StoppedError
                return json.loads(line.result())
            except (OSError, ValueError):
                self._child = None
                raise UserError(
                    f"llama.cpp ended while it read {self.file.name}: is the file one that it knows?"
                ) from None
            except StoppedError:
                child.kill()
                child.wait()
                self._child = None
                raise


def serve() -> None:
    """Run as the process of :class:`Apart`: read a line of facts, then a line for each prompt, and answer each line
    with a line."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library's output is no report
    facts = json.loads(sys.stdin.readline())
    rival = LlamaCpp(
        LLAMA_CPP,
        frozenset(facts["stop_ids"]),
        facts["context"],
        Path(facts["file"]),
        facts["threads"],
        facts["lookup"],
    )
    package = importlib.import_module("llama_cpp")
    built = " ".join(str(package.llama_print_system_info().decode()).split())
    reports.write(json.dumps(f"llama-cpp-python {package.__version__}, {rival.file.name}; built with {built}") + "\n")
    for line in sys.stdin:
        request, arrivals = json.loads(line), Arrivals(lambda: False)
        report: dict[str, Any]
        try:
            rival.say(request["prompt"], SimpleNamespace(**request["settings"]), request["limit"], arrivals)  # type: ignore[arg-type]
            report = arrivals.notes()
        except Exception as error:  # whatever it is, it is reported in one line
            report = {"error": " ".join(str(error).split())[:200] or type(error).__name__}
        reports.write(json.dumps(report) + "\n")


def llama_rivals(engine: PairEngine, options: LoadOptions, progress: Progress) -> tuple[list[Rival], str]:
    """Return llama.cpp without and with drafts, and a line on its version. UsageError for a target that is no GGUF
    file."""
    import torch

    from utils.loading.sources import gguf_file

    spec = engine.loaded.spec.target
    file = gguf_file(spec, options, progress)
    if file is None:
        raise UsageError(f"{LLAMA_CPP} needs a target in a GGUF file, {spec.name} is none")
    facts = (engine.stop_ids, engine.context, file, torch.get_num_threads())
    rivals = [Apart("llama-plain", *facts), Apart("llama-lookup", *facts, lookup=True)]
    try:
        about = rivals[0].about(progress.cancelled)
    except StoppedError:
        raise Cancelled("interrupted") from None
    return [*rivals], f"llama-plain, llama-lookup: {about}"


# -- onnxruntime-genai --------------------------------------------------------------------------------


@dataclass
class OnnxRuntime(Rival):
    """A model of onnxruntime-genai's, without drafts or with those of its n-grams."""

    model: Any
    drafts: bool = False

    def say(self, prompt: list[int], settings: Settings, limit: int, arrivals: Arrivals) -> None:
        import numpy as np

        package = importlib.import_module("onnxruntime_genai")
        params = package.GeneratorParams(self.model)
        search: dict[str, Any] = {"do_sample": settings.temperature > 0, "max_length": len(prompt) + limit}
        if settings.temperature > 0:
            search |= {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
            search |= {"random_seed": settings.seed % (1 << 31)}
        params.set_search_options(**search)
        if self.drafts:
            params.set_speculative_options(**NGRAM)
        arrivals.begin()
        generator, passes = package.Generator(self.model, params), 0
        generator.append_tokens(np.array(prompt, dtype=np.int32))
        while not generator.is_done() and len(arrivals.ids) < limit:
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            known = generator.get_speculative_stats() if self.drafts else {}
            before, passes = passes, known.get("rounds", 0) + known.get("standard_fallback_steps", 0)
            arrivals.add([token], more=self.drafts and passes == before)
            if token in self.stop_ids:
                return


def onnx_rivals(engine: PairEngine, options: LoadOptions, progress: Progress) -> tuple[list[Rival], str]:
    """Return onnxruntime-genai in each precision, without and with drafts, and a line on its version."""
    import torch

    from utils.loading.sources import model_folder

    if engine.encodes:
        raise UsageError(f"{ONNXRUNTIME} has no encoder-decoder models")
    package = importlib.import_module("onnxruntime_genai")
    folder = model_folder(engine.loaded.spec.target, options, progress)
    session = {"intra_op_num_threads": torch.get_num_threads()}
    overlay = json.dumps({"model": {"decoder": {"session_options": session}}})
    rivals: list[Rival] = []
    for precision in PRECISIONS:
        config = package.Config(str(onnx_folder(folder, precision, package.__version__, progress)))
        config.overlay(overlay)
        model = package.Model(config)
        for name, drafts in ((f"ort-{precision}", False), (f"ort-{precision}-ngram", True)):
            rivals.append(OnnxRuntime(name, engine.stop_ids, engine.context, model, drafts))
    names = ", ".join(rival.name for rival in rivals)
    how = f"blocks of {BLOCK}, accuracy level {ACCURACY}, n-grams of {NGRAM['ngram_size']}"
    return (
        rivals,
        f"{names}: {ONNXRUNTIME} {package.__version__}, made from the float32 weights by its own builder; {how}",
    )


def onnx_folder(folder: Path, precision: str, version: str, progress: Progress) -> Path:
    """Return the folder in the cache of the ONNX model of the model in `folder`; the package builds it if it is
    missing."""
    from utils.loading.cache import cache_folder, is_whole, locked, publish, scratch
    from utils.progress import run_child

    weights = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))
    ]
    how = [str(folder.resolve()), weights, precision, version, BLOCK, ACCURACY]
    digest = hashlib.sha256(json.dumps(how).encode()).hexdigest()
    entry = cache_folder() / "onnx" / f"{precision}-{digest[:16]}"
    source: dict[str, object] = {"sha256": digest}
    with locked(entry, progress):
        if is_whole(entry, source):
            return entry
        with scratch(entry) as out:
            words = f"making ONNX {precision} of the target, once"
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(out)]
            command += ["-p", precision, "-e", "cpu", "-c", str(out / "left")]
            status, errors = run_child(
                [*command, "--extra_options", f"block_size={BLOCK}", f"accuracy_level={ACCURACY}"],
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                on_line=lambda line: None,
                on_tick=lambda: progress(words),
            )
            if status:
                last = errors.strip().splitlines()[-1:] or [f"status {status}"]
                raise UserError(f"onnxruntime-genai's builder cannot make a model of {folder}: {last[0][:200]}")
            publish(out, entry, source)
    return entry


# -- agreement with float32 -----------------------------------------------------------------------------


def agreements(bench: Against, options: ModelOptions) -> dict[Variant, float]:
    """Return for each greedy variant the share of its first answers' tokens that the target in float32 would choose.

    A greedy token is the argmax of the arithmetic that chose it, and the target reads the same ids before it. Empty for
    sampled answers and encoder-decoders, if the target cannot be loaded in float32, or if a rule may choose another
    token than the argmax.
    """
    import torch

    settings = bench.settings
    greedy = bench.variants if settings.temperature == 0 else []
    if not greedy or settings.repetition_penalty != 1 or settings.no_repeat_ngram or bench.engine.encodes:
        return {}
    try:
        model = _in_float32(bench.engine, options)
    except UserError as error:
        sys.stderr.write(f"agreement with float32 is not known: {error}\n")
        return {}
    agreed, tokens = Counter[Variant](), Counter[Variant]()
    for item in bench.items:
        answers, prompt = item.answers[0], item.ids
        with torch.inference_mode():
            before = torch.tensor([prompt], device=model.device)
            cache = model(before[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
            chosen: dict[tuple[int, ...], list[int]] = {}
            for ids in {answers[variant].ids for variant in greedy if answers[variant].ids}:
                read = torch.tensor([[prompt[-1], *ids[:-1]]], device=model.device)
                logits = model(read, past_key_values=cache, use_cache=True).logits[
                    0, :, : bench.engine.target.vocab_size
                ]
                chosen[ids] = logits.argmax(-1).tolist()
                cache.crop(-len(ids))
        for variant in greedy:
            ids = answers[variant].ids
            agreed[variant] += sum(map(eq, ids, chosen.get(ids, ())))
            tokens[variant] += len(ids)
    return {variant: agreed[variant] / tokens[variant] for variant in greedy if tokens[variant]}


def _in_float32(engine: PairEngine, options: ModelOptions) -> Any:
    """Return the target's transformers model with float32 weights: as it is, or loaded again. UserError if it cannot
    be."""
    from utils.loading.build import load_model
    from utils.loading.sources import model_folder

    target = engine.loaded.target
    if target.precision == "float32":
        return target.model
    loading = replace(load_options(options), dtype="float32")
    spec = engine.loaded.spec.target.model_copy(update={"quantization": "none"})
    folder = model_folder(spec, loading)
    return load_model(spec, folder, loading, str(target.device), "none").model


# -- the run ------------------------------------------------------------------------------------------


class Against(Bench):
    """A benchmark whose variants are our lanes and the rivals."""

    def __init__(self, *given: Any, rivals: Mapping[str, Rival]) -> None:
        super().__init__(*given)
        self.rivals = rivals
        self.variants += map(Variant, rivals)

    def answer(
        self, variant: Variant, prompt: list[int], messages: Sequence[Any], text: str | None = None, **changes: Any
    ) -> Answer:
        """Return an answer of a lane or a rival, each with an empty cache."""
        rival = self.rivals.get(variant.method)
        if rival is None:
            return super().answer(variant, prompt, messages, text, **changes)
        return rival.answer(prompt, self.settings.changed(**changes), self.decode, self.interrupt)

    def rows(self, agreement: Mapping[Variant, float]) -> list[dict[str, Any]]:
        """Return the figures of each variant; speed-ups are medians over repeats."""
        timed = [Timed(self.items, variant, self.reference) for variant in self.variants]
        rows = []
        for own in timed:
            rivals = [other for other in timed if other.variant.method in self.rivals and other.rates]
            fastest = max(rivals, key=lambda other: fmean(other.rates), default=None)
            over = [] if fastest is None else own.speedups(fastest.variant)
            first = [answer.stats.ttft_ms for answer in own.answers if answer.stats.ttft_ms is not None]
            rows.append(
                {
                    **vars(own.variant),
                    "rates": own.rates,
                    "speedup": own.speedup,
                    "over_fastest_rival": median(over) if over else None,
                    "ttft_ms": fmean(first) if first else None,
                    "tokens_per_pass": own.total.tokens_per_pass,
                    "agreement": agreement.get(own.variant),
                }
            )
        return rows


def rivals_of(
    engine: PairEngine,
    settings: Settings,
    options: ModelOptions,
    programs: Sequence[str],
    cancelled: Callable[[], bool],
) -> dict[str, Rival]:
    """Return the rivals of the programs; a note on each program goes to standard error."""
    rivals: dict[str, Rival] = {}
    for program in programs:
        make = {LLAMA_CPP: llama_rivals, ONNXRUNTIME: onnx_rivals}.get(program)
        if make is None:
            ways, notes = make_rivals(engine, options, program)
            rivals |= ways
        else:
            with load_progress(sys.stderr, quiet=settings.quiet, cancelled=cancelled) as progress:
                others, note = make(engine, load_options(options), progress)
            rivals |= {rival.name: rival for rival in others}
            notes = [note]
        sys.stderr.writelines(f"{note}\n" for note in notes)
    return rivals


def main(words: Sequence[str]) -> int:
    """Time all, print the table and write the file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=TRANSFORMERS, help="comma list of the programs to time beside our lanes")
    own, rest = parser.parse_known_args(words)
    request = read_request(["bench", *rest], os.environ)
    settings, options, args = layers_of(request).settings, request.options, request.own
    programs = own.programs.split(",")
    for program in programs:
        if program.partition(":")[0] not in (TRANSFORMERS, LLAMA_CPP, ONNXRUNTIME):
            raise UsageError(f"--programs knows transformers[:DRAFTER], llama.cpp and onnxruntime-genai, got {program}")
        check_installed(program, settings)
    questions = selected(args, settings.data_dir)
    with Interrupts() as interrupt:
        engine = load_engine(settings, options, interrupt)
        rivals = rivals_of(engine, settings, options, programs, interrupt)
        bench = Against(engine, settings, args, questions, interrupt, rivals=rivals)
        bench.run()
        rows = bench.rows({} if bench.interrupted else agreements(bench, options))
    table = small_table(settings)
    for name in ("method", "tok/s", "over ar", "over the fastest rival", "tok/pass", "TTFT", "float32"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        figures = [
            ("rates", "{:.1f}"),
            ("tokens_per_pass", "{:.2f}"),
            ("ttft_ms", "{:.0f} ms"),
            ("agreement", "{:.3f}"),
        ]
        cells = {}
        for name, form in figures:
            value = (fmean(row[name]) if row[name] else None) if name == "rates" else row[name]
            cells[name] = "-" if value is None else form.format(value)
        label = Variant(row["method"], row["gamma"]).label
        speeds = (times(row["speedup"]), times(row["over_fastest_rival"]))
        table.add_row(label, cells["rates"], *speeds, cells["tokens_per_pass"], cells["ttft_ms"], cells["agreement"])
    print_table(screen(settings, sys.stdout), f"{bench.measured} answers; rates leave prefill out", table)
    if args.out is not None:
        write_json(args.out, {"machine": machine(engine.loaded), "programs": programs, "rows": rows})
    return INTERRUPTED if bench.interrupted else 0


CHILD = "--as-llama-cpp"  # the flag with which this file starts itself for llama.cpp
if __name__ == "__main__":
    try:
        sys.exit(serve() if sys.argv[1:] == [CHILD] else main(sys.argv[1:]))  # type: ignore[func-returns-value]
    except UserError as error:
        sys.exit(f"error: {error}")
