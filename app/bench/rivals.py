"""The programs that `bench --against` times beside ours: what they have in common, llama.cpp and onnxruntime-genai.

A rival gets the prompt's ids and says ids; one clock hears them all (:class:`Arrivals`). What is heard first ends the
time to first token, and the rate counts what comes after it: tokens behind the first run / seconds between the first
hearing and the last, so that reading the prompt is in no rate, as in ours. What comes after the last token counts
nowhere.

* llama-plain, llama-lookup: `llama-cpp-python` on the target's own GGUF file, without drafts and with its own prompt
  lookup (as it comes: 10 tokens behind a match of 2).
* ort-int8, ort-int4, with -ngram too: `onnxruntime-genai` on what its own model builder makes of the target's float32
  weights: blocks of 32, accuracy level 4 (8-bit activations); without drafts and with its n-gram drafts.

Both compute with as many threads as torch, round in their own way and so say texts of their own. Knows nothing of
transformers (app/bench/against.py), and no figures of drafts.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from app.lanes.answers import Answer
from app.settings.table import Settings
from sampling.stats.summary import Stats
from utils.errors import UsageError, UserError
from utils.progress import Cancelled

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine
    from utils.loading.loaded import LoadOptions
    from utils.progress import Progress


LLAMA_CPP, ONNXRUNTIME = "llama.cpp", "onnxruntime-genai"
PACKAGES = {  # of each: what is imported, and what brings it
    LLAMA_CPP: (("llama_cpp",), "llama-cpp-python (pip builds it for this machine, which takes minutes)"),
    ONNXRUNTIME: (("onnxruntime_genai", "onnx_ir"), "onnxruntime-genai onnx-ir"),
}
PRECISIONS = ("int8", "int4")
BLOCK, ACCURACY = 32, 4
NGRAM = {"ngram_size": 3}  # and 4 tokens behind a match, as it comes
LEAST_ROOM = 1024  # tokens that llama.cpp makes room for at first


class StoppedError(Exception):
    """Ends a rival's answer from within."""


class Arrivals:
    """Notes when tokens arrive: `ids`, of each run its length, and the times in seconds."""

    def __init__(self, interrupt: Callable[[], bool]) -> None:
        self.ids: list[int] = []
        self.runs: list[int] = []
        self.times: list[float] = []
        self.started = 0.0
        self.interrupted = interrupt

    def begin(self) -> None:
        """The clock starts: from here on the prompt is read."""
        self.started = time.perf_counter()

    def add(self, ids: Sequence[int], *, more: bool = False) -> None:
        """Tokens that are heard now; `more`: they continue the previous run. Raises StoppedError after an interrupt."""
        self.times.append(time.perf_counter())
        self.ids += ids
        if more and self.runs:
            self.runs[-1] += len(ids)
        else:
            self.runs.append(len(ids))
        if self.interrupted():
            raise StoppedError

    def heard(self) -> dict[str, Any]:
        """What was noted, to be told to another process."""
        return {name: value for name, value in vars(self).items() if name != "interrupted"}

    def stats(self, prompt_n: int, reason: Any) -> Stats:
        """The figures of an answer; tokens of the first run are in no rate."""
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
    """One way in which another program decodes. `another`: by arithmetic of its own, so that texts rightly differ."""

    name: str
    stop_ids: frozenset[int]
    context: int

    another: ClassVar[bool] = True
    hears: ClassVar[type[Arrivals]] = Arrivals

    @abstractmethod
    def say(self, prompt: list[int], settings: Settings, limit: int, arrivals: Arrivals) -> None:
        """Decode up to `limit` tokens, a stop token included, into `arrivals`, which are begun here."""

    def answer(
        self,
        prompt: Sequence[int],
        settings: Settings,
        decode: Callable[[list[int]], str],
        interrupt: Callable[[], bool],
    ) -> Answer:
        """Decode one prompt, from nothing. Sampled answers repeat with the seed; they are other draws than our
        lanes'."""
        arrivals, interrupted = self.hears(interrupt), False
        try:
            self.say(list(prompt), settings, min(settings.max_new_tokens, self.context - len(prompt)), arrivals)
        except StoppedError:
            interrupted = True
        ended = "eos" if arrivals.ids and arrivals.ids[-1] in self.stop_ids else "length"
        stats, ids = arrivals.stats(len(prompt), "interrupted" if interrupted else ended), tuple(arrivals.ids)
        differs = self.another or settings.temperature > 0
        return Answer(self.name, ids, decode(list(ids)), stats, may_differ=differs, another=self.another)


def check_installed(program: str, settings: Settings) -> None:
    """UsageError, before any work, without the package that a program comes in, or for settings that it has not."""
    modules, package = PACKAGES.get(program, ((), ""))
    if any(name not in sys.modules and importlib.util.find_spec(name) is None for name in modules):
        raise UsageError(f"--against {program} needs a package that is not here: pip install {package}")
    rules: dict[str, Any] = {
        "repetition_penalty": settings.repetition_penalty != 1,
        "no_repeat_ngram": settings.no_repeat_ngram,
    }
    rules |= {"min_p": settings.temperature and settings.min_p} if program == ONNXRUNTIME else {}
    for name in (name for name, given in rules.items() if given and modules):
        raise UsageError(f"--against {program} has no rule like our --{name.replace('_', '-')}: leave one of them out")


# -- llama.cpp ----------------------------------------------------------------------------------------


@dataclass
class LlamaCpp(Rival):
    """A GGUF file as llama-cpp-python decodes it. Room for more tokens is made before the clock starts."""

    file: Path
    threads: int
    lookup: bool = False
    _llama: Any = field(default=None, init=False, repr=False)

    def say(self, prompt: list[int], settings: Settings, limit: int, arrivals: Arrivals) -> None:
        llama = self._with_room(len(prompt) + limit)
        llama.reset()  # else it goes on from what this prompt has in common with the last one
        llama.set_seed(settings.seed)
        drafter, asked = llama.draft_model, 0
        if drafter is not None:
            asked = drafter.asked
        arrivals.begin()
        for token in llama.generate(
            prompt, temp=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p
        ):
            before, asked = asked, 0 if drafter is None else drafter.asked
            arrivals.add([token], more=drafter is not None and asked == before)
            if token in self.stop_ids or len(arrivals.ids) >= limit:
                return

    def _with_room(self, tokens: int) -> Any:
        """The model with a context that takes so many tokens."""
        if self._llama is None or self._llama.n_ctx() < tokens:
            package = importlib.import_module("llama_cpp")
            self._llama = None
            self._llama = package.Llama(
                str(self.file),
                n_ctx=min(self.context, max(LEAST_ROOM, 1 << (tokens - 1).bit_length())),
                n_threads=self.threads,
                n_threads_batch=self.threads,
                draft_model=_Counted() if self.lookup else None,
                logits_all=self.lookup,  # else its drafts fail behind prompts of more than one batch
                verbose=False,
            )
        return self._llama


class _Counted:
    """llama-cpp-python's prompt lookup, and how often it was `asked`: once before each pass but the first."""

    def __init__(self) -> None:
        self._lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding()
        self.asked = 0

    def __call__(self, input_ids: Any, /, **more: Any) -> Any:
        self.asked += 1
        return self._lookup(input_ids, **more)


@dataclass
class Apart(Rival):
    """:class:`LlamaCpp` in a process of its own, which times itself and tells all in the end.

    In ours it would run on torch's OpenMP threads, which spin shorter than llama.cpp is used to (infer.py), and lose a
    third of its speed. An interrupt ends the process; the next answer starts another.
    """

    file: Path
    threads: int
    lookup: bool = False
    _child: subprocess.Popen[str] | None = field(default=None, init=False, repr=False)

    def say(self, prompt: list[int], settings: Settings, limit: int, arrivals: Arrivals) -> None:
        sampling = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        if self._child is None:
            self.about(arrivals.interrupted)
        told = self._asked({"prompt": prompt, "limit": limit, "settings": sampling}, arrivals.interrupted)
        if "error" in told:
            raise UserError(f"llama.cpp cannot answer a prompt of {len(prompt)} tokens: {told['error']}")
        vars(arrivals).update(told)

    def about(self, interrupted: Callable[[], bool]) -> str:
        """Start the process; version, and what it was built with."""
        root = str(Path(__file__).resolve().parents[2])
        env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "app.bench.rivals"],
            env={**env, "PYTHONPATH": os.pathsep.join([root, env.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        facts = {"stop_ids": [*self.stop_ids], "context": self.context, "file": str(self.file)}
        return str(self._asked({**facts, "threads": self.threads, "lookup": self.lookup}, interrupted))

    def _asked(self, what: dict[str, Any], interrupted: Callable[[], bool]) -> Any:
        """What the process answers to a line. UserError if it has ended, StoppedError after an interrupt."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        with ThreadPoolExecutor(1) as reader:
            try:
                child.stdin.write(json.dumps(what) + "\n")
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


def main() -> None:
    """The process: a line of facts, then a line for each prompt; what is heard of it is a line, too."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no report
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
        asked, arrivals = json.loads(line), Arrivals(lambda: False)
        told: dict[str, Any]
        try:
            rival.say(asked["prompt"], SimpleNamespace(**asked["settings"]), asked["limit"], arrivals)  # type: ignore[arg-type]
            told = arrivals.heard()
        except Exception as error:  # whatever it is, it is told in one line
            told = {"error": " ".join(str(error).split())[:200] or type(error).__name__}
        reports.write(json.dumps(told) + "\n")


def llama_rivals(
    engine: PairEngine, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[list[Rival], str]:
    """llama.cpp without and with drafts, and what it is. UsageError for a target that is no GGUF file."""
    import torch

    from utils.loading.sources import gguf_file

    spec = engine.loaded.spec.target
    file = gguf_file(spec, options, progress, cancelled)
    if file is None:
        raise UsageError(f"--against {LLAMA_CPP} needs a target in a GGUF file, {spec.name} is none")
    facts = (engine.stop_ids, engine.context, file, torch.get_num_threads())
    found = [Apart("llama-plain", *facts), Apart("llama-lookup", *facts, lookup=True)]
    try:
        about = found[0].about(cancelled)
    except StoppedError:
        raise Cancelled("interrupted") from None
    return [*found], f"llama-plain, llama-lookup: {about}"


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


def onnx_rivals(
    engine: PairEngine, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[list[Rival], str]:
    """onnxruntime-genai in each precision, without and with drafts, and what it is."""
    import torch

    from utils.loading.sources import model_folder

    if engine.encodes:
        raise UsageError(f"--against {ONNXRUNTIME} has no encoder-decoder models")
    package = importlib.import_module("onnxruntime_genai")
    folder = model_folder(engine.loaded.spec.target, options, progress, cancelled)
    session = {"intra_op_num_threads": torch.get_num_threads()}
    overlay = json.dumps({"model": {"decoder": {"session_options": session}}})
    found: list[Rival] = []
    for precision in PRECISIONS:
        config = package.Config(str(onnx_folder(folder, precision, package.__version__, progress, cancelled)))
        config.overlay(overlay)
        model = package.Model(config)
        for name, drafts in ((f"ort-{precision}", False), (f"ort-{precision}-ngram", True)):
            found.append(OnnxRuntime(name, engine.stop_ids, engine.context, model, drafts))
    names = ", ".join(rival.name for rival in found)
    how = f"blocks of {BLOCK}, accuracy level {ACCURACY}, n-grams of {NGRAM['ngram_size']}"
    return (
        found,
        f"{names}: {ONNXRUNTIME} {package.__version__}, made from the float32 weights by its own builder; {how}",
    )


def onnx_folder(folder: Path, precision: str, version: str, progress: Progress, cancelled: Callable[[], bool]) -> Path:
    """The ONNX model that the package's builder makes of the model in `folder`, kept in the cache; made if missing."""
    from utils.child import run_child
    from utils.loading.cache import cache_folder, is_whole, locked, publish, scratch

    weights = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))
    ]
    how = [str(folder.resolve()), weights, precision, version, BLOCK, ACCURACY]
    digest = hashlib.sha256(json.dumps(how).encode()).hexdigest()
    entry = cache_folder() / "onnx" / f"{precision}-{digest[:16]}"
    made_from: dict[str, object] = {"sha256": digest}
    with locked(entry, progress, cancelled):
        if is_whole(entry, made_from):
            return entry
        with scratch(entry) as made:
            words = f"making ONNX {precision} of the target, once"
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(made)]
            command += ["-p", precision, "-e", "cpu", "-c", str(made / "left")]
            status, said = run_child(
                [*command, "--extra_options", f"block_size={BLOCK}", f"accuracy_level={ACCURACY}"],
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                on_line=lambda line: None,
                on_tick=lambda: progress(words, None),
                cancelled=cancelled,
            )
            if status:
                last = said.strip().splitlines()[-1:] or [f"status {status}"]
                raise UserError(f"onnxruntime-genai's builder cannot make a model of {folder}: {last[0][:200]}")
            publish(made, entry, made_from)
    return entry


if __name__ == "__main__":
    main()
