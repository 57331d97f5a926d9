"""Other programs beside ours: one clock for all, what each is asked for, what it is when its package is not here.

The packages are never required: small fakes stand for them, which read and say ids as the real ones do; the real ones
are asked too where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import app.bench.rivals
from app.bench.against import Generate, Streamer, named, rivals_of
from app.bench.options import BenchArgs
from app.bench.rivals import LLAMA_CPP, ONNXRUNTIME, Apart, LlamaCpp, OnnxRuntime, Rival, onnx_folder, onnx_rivals
from app.bench.run import run_bench
from app.lanes.answers import parting, run_lane
from app.lanes.lane import PairEngine
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from tests.support.tiny import TinyPair, tiny_model, tiny_pair, write_prompts
from utils.errors import UsageError, UserError
from utils.loading.loaded import LoadOptions
from utils.progress import never, silent

SETTINGS = Settings(max_new_tokens=12, quiet=True)
PROMPT = [1, 70, 71, 72, 70, 71, 72, 70, 71]
READ, PASS = 0.5, 1.0  # seconds of a fake: to read a token of the prompt, of a pass
Say = Callable[[list[int]], int]


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def cycle(ids: list[int]) -> int:
    """70, 71, 72, 70 … behind PROMPT, but for a 90 now and then."""
    return 90 if len(ids) % 8 == 0 else {70: 71, 71: 72}.get(ids[-1], 70)


def after(calls: int) -> Callable[[], bool]:
    left = iter([False] * calls)
    return lambda: next(left, True)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(app.bench.rivals, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# -- the clock ----------------------------------------------------------------------------------


class Scripted:
    """A model whose `generate` hands over runs of tokens, each after so many seconds."""

    def __init__(self, clock: Clock, runs: list[tuple[float, list[int]]]) -> None:
        self.clock, self.runs, self.device = clock, runs, torch.device("cpu")
        self.config = tiny_model(layers=1, hidden=8).config

    def generate(self, ids: torch.Tensor, *, streamer: Streamer, **_: Any) -> None:
        streamer.put(ids)
        for seconds, run in self.runs:
            self.clock.now += seconds
            streamer.put(torch.tensor([run]))
        self.clock.now += 50.0
        streamer.end()


def scripted(clock: Clock, runs: list[tuple[float, list[int]]]) -> Rival:
    return Generate("hf-x", frozenset({2}), 100, Scripted(clock, runs), 300)


def test_only_what_comes_after_the_first_run_is_in_a_rate(clock: Clock) -> None:
    answer = scripted(clock, [(9.0, [5, 6, 7]), (1.0, [8]), (3.0, [9, 9, 9])]).answer(PROMPT, SETTINGS, decode, never)
    stats = answer.stats
    assert answer.ids == (5, 6, 7, 8, 9, 9, 9)
    assert (stats.ttft_ms, stats.predicted_ms) == (9000, 4000)
    assert stats.predicted_per_second == 1.0  # 4 tokens in 4 s
    assert (stats.openings, stats.target_passes, stats.tokens_per_pass) == (3, 2, 2.0)
    assert (stats.acceptance_rate, stats.alpha) == (None, None)
    told = stats.to_json()  # holds what its rate is made of
    assert told["predicted_per_second"] == 1000 * (told["predicted_n"] - told["openings"]) / told["predicted_ms"]


def test_an_answer_of_one_run_has_no_rate(clock: Clock) -> None:
    stats = scripted(clock, [(9.0, [5, 2])]).answer(PROMPT, SETTINGS, decode, never).stats
    assert (stats.predicted_per_second, stats.tokens_per_pass, stats.stop_reason) == (None, None, "eos")


# -- fakes --------------------------------------------------------------------------------------


class Lookup:
    """What followed the latest tokens' first earlier place: one token of match, as many as asked for."""

    def __call__(self, input_ids: np.ndarray, /, **_: Any) -> np.ndarray:
        known = input_ids.tolist()
        place = known.index(known[-1]) + 1
        return input_ids[place : place + 10] if place < len(known) else np.array([], np.intc)


class Llama:
    """`llama_cpp.Llama`: it goes on from what it has in common with the last prompt unless it was reset."""

    made: list[Llama]
    clock: Clock
    say: Say

    def __init__(
        self,
        model_path: str,
        *,
        n_ctx: int,
        n_threads: int,
        n_threads_batch: int,
        draft_model: Any,
        logits_all: bool,
        verbose: bool,
    ) -> None:
        assert n_threads == n_threads_batch
        assert logits_all == (draft_model is not None)  # the real one has room for 512 rows of logits else
        assert not verbose
        self.path, self.room, self.threads, self.draft_model = model_path, n_ctx, n_threads, draft_model
        self.held: list[int] = []
        self.asked: list[dict[str, Any]] = []
        type(self).made.append(self)

    def n_ctx(self) -> int:
        return self.room

    def reset(self) -> None:
        self.held = []

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def generate(self, tokens: list[int], **given: Any) -> Iterator[int]:
        self.asked.append({**given, "seed": self.seed})
        common = self.held == tokens[: len(self.held)] and len(self.held)
        self.clock.now += READ * (len(tokens) - common)
        ids, drafts = list(tokens), list[int]()
        while True:
            for draft in [*drafts, None]:
                token = type(self).say(ids)
                ids.append(token)
                self.held = list(ids)
                yield token
                assert len(ids) <= self.room
                if token != draft:
                    break
            if self.draft_model is not None:
                drafts = self.draft_model(np.array(ids, np.intc)).tolist()
            self.clock.now += PASS


class Generator:
    """`onnxruntime_genai.Generator`: tokens of a pass one by one."""

    clock: Clock
    say: Say

    def __init__(self, model: Any, params: Any) -> None:
        self.model, self.params = model, params
        self.ids: list[int] = []
        self.drafts: list[int] = []
        self.rounds = self.fallbacks = 0
        model.asked.append({**params.search, **params.speculative})

    def append_tokens(self, tokens: np.ndarray) -> None:
        assert tokens.dtype == np.int32
        self.clock.now += READ * len(tokens)
        self.ids += tokens.tolist()

    def generate_next_token(self) -> None:
        if not self.drafts:
            self.clock.now += PASS
            self.drafts = Lookup()(np.array(self.ids)).tolist()[:4] if self.params.speculative else []
            self.rounds, self.fallbacks = self.rounds + bool(self.drafts), self.fallbacks + (not self.drafts)
        token = type(self).say(self.ids)
        self.drafts = self.drafts[1:] if self.drafts[:1] == [token] else []
        self.ids.append(token)

    def get_next_tokens(self) -> np.ndarray:
        return np.array(self.ids[-1:], np.int32)

    def get_speculative_stats(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "standard_fallback_steps": self.fallbacks}

    def is_done(self) -> bool:
        return len(self.ids) >= self.params.search["max_length"]


class Params:
    def __init__(self, model: Any) -> None:
        self.search: dict[str, Any] = {}
        self.speculative: dict[str, Any] = {}

    def set_search_options(self, **given: Any) -> None:
        assert {*given} <= {"do_sample", "max_length", "temperature", "top_k", "top_p", "random_seed"}
        self.search |= given

    def set_speculative_options(self, **given: Any) -> None:
        self.speculative |= given


class Config:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def overlay(self, text: str) -> None:
        self.overlaid = json.loads(text)


class Model:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.asked: list[dict[str, Any]] = []


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Both packages as fakes, which say `cycle`."""
    for one in (Llama, Generator):
        monkeypatch.setattr(one, "clock", clock, raising=False)
        monkeypatch.setattr(one, "say", staticmethod(cycle), raising=False)
    monkeypatch.setattr(Llama, "made", [], raising=False)
    llama, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    vars(llama).update(Llama=Llama, __version__="0.3", llama_print_system_info=lambda: b"CPU : AVX2 = 1 | ")
    vars(speculative).update(LlamaPromptLookupDecoding=Lookup)
    genai = ModuleType("onnxruntime_genai")
    vars(genai).update(Config=Config, Model=Model, GeneratorParams=Params, Generator=Generator, __version__="0.18")
    for module in (llama, speculative, genai, ModuleType("onnx_ir")):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def llama(lookup: bool = False, context: int = 4096, stop: int = 2) -> LlamaCpp:
    return LlamaCpp("llama-x", frozenset({stop}), context, Path("model.gguf"), 3, lookup)


def onnx(drafts: bool = False, context: int = 4096, stop: int = 2) -> OnnxRuntime:
    return OnnxRuntime("ort-x", frozenset({stop}), context, Model(Config("x")), drafts)


BOTH = pytest.mark.parametrize("make", [llama, onnx])


class Here(LlamaCpp):
    """As `Apart`, in this process."""

    def about(self, cancelled: Callable[[], bool]) -> str:
        return "llama-cpp-python 0.3"


def said(count: int) -> tuple[int, ...]:
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(cycle(ids))
    return tuple(ids[len(PROMPT) :])


# -- answers ------------------------------------------------------------------------------------


@BOTH
def test_a_rival_reads_ids_and_says_ids(packages: None, make: Callable[..., Rival]) -> None:
    answer = make().answer(PROMPT, SETTINGS, decode, never)
    stats = answer.stats
    assert answer.ids == said(12)
    assert (answer.text, stats.stop_reason, stats.prompt_n) == (decode(list(said(12))), "length", len(PROMPT))
    opening = 1000 * READ * len(PROMPT) + (1000 * PASS if make is onnx else 0)
    assert (stats.ttft_ms, stats.prompt_ms, stats.predicted_ms) == (opening, opening, 11_000 * PASS)
    assert (stats.predicted_per_second, stats.tokens_per_pass) == (1 / PASS, 1)
    assert (answer.may_differ, answer.another) == (True, True)


@BOTH
def test_drafts_are_heard_as_runs(packages: None, make: Callable[..., Rival]) -> None:
    plain, drafted = (make(drafts).answer(PROMPT, SETTINGS, decode, never) for drafts in (False, True))
    assert drafted.ids == plain.ids
    assert drafted.stats.target_passes < plain.stats.target_passes / 1.5
    assert drafted.stats.predicted_ms == 1000 * PASS * drafted.stats.target_passes
    assert drafted.stats.predicted_per_second == pytest.approx(drafted.stats.tokens_per_pass)


@BOTH
def test_nothing_is_left_of_an_earlier_answer(packages: None, make: Callable[..., Rival]) -> None:
    for drafts in (False, True):
        rival = make(drafts)
        first, again = (rival.answer(PROMPT, SETTINGS, decode, never) for _ in range(2))
        assert (first.ids, first.stats) == (again.ids, again.stats)


@BOTH
def test_a_stop_token_and_the_context_end_an_answer(packages: None, make: Callable[..., Rival]) -> None:
    place = said(12).index(90)
    for drafts in (False, True):
        answer = make(drafts, stop=90).answer(PROMPT, SETTINGS, decode, never)
        assert (answer.ids, answer.stats.stop_reason) == (said(place + 1), "eos")
        answer = make(drafts, context=len(PROMPT) + 5).answer(PROMPT, SETTINGS, decode, never)
        assert (answer.ids, answer.stats.stop_reason) == (said(5), "length")


@BOTH
def test_an_interrupt_ends_it(packages: None, make: Callable[..., Rival]) -> None:
    rival = make()
    answer = rival.answer(PROMPT, SETTINGS, decode, after(2))
    assert (answer.interrupted, answer.ids) == (True, said(3))
    assert rival.answer(PROMPT, SETTINGS, decode, never).ids == said(12)


def test_llama_cpp_gets_the_settings_threads_and_room(packages: None) -> None:
    rival = llama()
    rival.answer(PROMPT, SETTINGS.changed(seed=7), decode, never)
    hot = SETTINGS.changed(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=8)
    rival.answer(PROMPT, hot, decode, never)
    [only] = Llama.made
    assert (only.path, only.threads, only.room, only.draft_model) == ("model.gguf", 3, 1024, None)
    assert only.asked == [
        {"temp": 0, "top_k": SETTINGS.top_k, "top_p": SETTINGS.top_p, "min_p": SETTINGS.min_p, "seed": 7},
        {"temp": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 8},
    ]
    rival.answer(PROMPT * 150, SETTINGS, decode, never)
    rival.answer(PROMPT * 420, SETTINGS, decode, never)
    assert [one.room for one in Llama.made] == [1024, 2048, 4096]
    rival.answer(PROMPT, SETTINGS, decode, never)
    assert len(Llama.made) == 3


def test_onnxruntime_gets_the_settings(packages: None) -> None:
    plain, drafting = onnx(), onnx(True)
    plain.answer(PROMPT, SETTINGS, decode, never)
    plain.answer(PROMPT, SETTINGS.changed(temperature=0.7, top_k=5, top_p=0.9, seed=2**31 + 8), decode, never)
    drafting.answer(PROMPT, SETTINGS, decode, never)
    most = {"max_length": len(PROMPT) + 12}
    assert plain.model.asked == [
        {"do_sample": False, **most},
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "random_seed": 8, **most},
    ]
    assert drafting.model.asked == [{"do_sample": False, "ngram_size": 3, **most}]


# -- what can be had ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            LLAMA_CPP,
            r"^--against llama.cpp needs a package that is not here: pip install llama-cpp-python \(pip builds",
        ),
        (ONNXRUNTIME, r"^--against onnxruntime-genai needs a package .*: pip install onnxruntime-genai onnx-ir$"),
    ],
)
def test_a_missing_package_is_said_before_any_work(
    monkeypatch: pytest.MonkeyPatch, pair: TinyPair, program: str, words: str
) -> None:
    for name in ("llama_cpp", "onnxruntime_genai"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.util.find_spec
    gone = ("llama_cpp", "onnxruntime_genai")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in gone else found(name, *more))
    args = BenchArgs("no such file", against=f"transformers,{program}")
    with pytest.raises(UsageError, match=words):
        run_bench(SETTINGS, pair.options(), args)
    assert named("transformers:x", SETTINGS) == ["transformers:x"]
    assert named(None, SETTINGS) == []


def test_a_rule_that_a_program_has_not_is_refused(packages: None) -> None:
    for program in (LLAMA_CPP, ONNXRUNTIME):
        for changes in ({"repetition_penalty": 1.1}, {"no_repeat_ngram": 3}):
            with pytest.raises(UsageError, match=f"--against {program} has no rule like our --(repetition|no-repeat)-"):
                named(program, SETTINGS.changed(**changes))
            assert named("transformers", SETTINGS.changed(**changes)) == ["transformers"]
    heated = SETTINGS.changed(temperature=1, min_p=0.1)
    with pytest.raises(UsageError, match="no rule like our --min-p"):
        named(ONNXRUNTIME, heated)
    assert named(LLAMA_CPP, heated) == [LLAMA_CPP]
    assert named(ONNXRUNTIME, SETTINGS.changed(min_p=0.1)) == [ONNXRUNTIME]  # greedy: it changes nothing


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("rivals"), stop=False, context=300, noise=0.05)


@pytest.fixture
def options(pair: TinyPair) -> ModelOptions:
    return pair.options()


@pytest.fixture
def engine(options: ModelOptions) -> PairEngine:
    return load_engine(SETTINGS, options, never)


def test_llama_cpp_decodes_gguf_files_only(packages: None, engine: PairEngine, options: ModelOptions) -> None:
    with pytest.raises(UsageError, match=r"--against llama.cpp needs a target in a GGUF file, .* is none"):
        rivals_of(engine, SETTINGS, options, [LLAMA_CPP], never)


def test_an_onnx_model_is_made_once(packages: None, pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def build(command: list[str], **_: Any) -> tuple[int, str]:
        commands.append(command)
        (Path(command[command.index("-o") + 1]) / "model.onnx").write_text("x")
        return 0, ""

    monkeypatch.setattr("utils.child.run_child", build)
    first, again = (onnx_folder(pair.target, "int4", "1", silent, never) for _ in range(2))
    assert first == again
    assert (first / "model.onnx").read_text() == "x"
    [command] = commands
    assert command[1:5] == ["-m", "onnxruntime_genai.models.builder", "-i", str(pair.target)]
    assert command[7:11] == ["-p", "int4", "-e", "cpu"]
    assert command[-3:] == ["--extra_options", "block_size=32", "accuracy_level=4"]
    others = {
        onnx_folder(pair.target, "int8", "1", silent, never),
        onnx_folder(pair.target, "int4", "2", silent, never),
    }
    assert len({first} | others) == len(commands) == 3
    monkeypatch.setattr("utils.child.run_child", lambda *_, **__: (1, "Traceback\nKeyError: 'tiny'\n"))
    with pytest.raises(UserError, match=r"builder cannot make a model of .*: KeyError: 'tiny'$"):
        onnx_folder(pair.drafter, "int4", "1", silent, never)


def test_onnxruntime_has_as_many_threads_as_torch(
    packages: None, engine: PairEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.bench.rivals, "onnx_folder", lambda folder, precision, *_: Path(precision))
    found, note = onnx_rivals(engine, LoadOptions(), silent, never)
    assert [rival.name for rival in found] == ["ort-int8", "ort-int8-ngram", "ort-int4", "ort-int4-ngram"]
    models: list[Any] = [vars(rival)["model"] for rival in found]
    assert [model.config.folder for model in models] == ["int8", "int8", "int4", "int4"]
    session = models[0].config.overlaid["model"]["decoder"]["session_options"]
    assert session == {"intra_op_num_threads": torch.get_num_threads()}
    assert "onnxruntime-genai 0.18, made from the float32 weights" in note


# -- a process of its own -----------------------------------------------------------------------

PACKAGE = """
import os, sys, time
__version__ = "0.3"
print("a library's own words")

def llama_print_system_info():
    return ("spin " + os.environ.get("GOMP_SPINCOUNT", "its own")).encode()

class Llama:
    draft_model = None
    def __init__(self, path, **given):
        self.given = given
    def n_ctx(self):
        return self.given["n_ctx"]
    def reset(self):
        pass
    def set_seed(self, seed):
        self.seed = seed
    def generate(self, prompt, temp, top_k, top_p, min_p):
        for token in prompt:
            if token == 13:
                sys.exit(1)
            if token == 14:
                raise ValueError("no room")
            time.sleep(60 if token == 60 else 0.002)
            yield token + self.seed + int(10 * temp)
"""


def test_llama_cpp_times_itself_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees no spin count of ours, its prints are no answers, and an interrupt or its end leaves nothing behind."""
    (tmp_path / "llama_cpp.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    rival = Apart("llama-x", frozenset({9}), 100, tmp_path / "model.gguf", 2)
    assert rival.about(never) == "llama-cpp-python 0.3, model.gguf; built with spin its own"
    settings = SETTINGS.changed(seed=1, temperature=0.5)
    answer = rival.answer([1, 2, 3, 4], settings, decode, never)
    assert (answer.ids, answer.stats.stop_reason, answer.stats.target_passes) == ((7, 8, 9), "eos", 2)
    assert 0 < (answer.stats.ttft_ms or 0) < 1000
    assert 4 <= answer.stats.predicted_ms < 1000
    [child] = [vars(rival)["_child"]]
    assert rival.answer([60, 1], settings, decode, after(3)).interrupted
    assert child.poll() is not None
    assert rival.answer([1, 2], settings, decode, never).ids == (7, 8)
    with pytest.raises(UserError, match=r"^llama.cpp cannot answer a prompt of 2 tokens: no room$"):
        rival.answer([1, 14], settings, decode, never)
    assert rival.answer([1, 2], settings, decode, never).ids == (7, 8)
    with pytest.raises(UserError, match=r"^llama.cpp ended while it read model.gguf: is the file one that it knows\?$"):
        rival.answer([13], settings, decode, never)
    assert rival.answer([1, 2], settings, decode, never).ids == (7, 8)


# -- the whole benchmark ------------------------------------------------------------------------


def test_their_figures_stand_beside_ours_with_their_agreement(
    packages: None,
    options: ModelOptions,
    engine: PairEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both programs are the target itself, but that llama.cpp is wrong at every fourth token."""
    model = engine.loaded.target.model

    def right(ids: list[int]) -> int:
        with torch.inference_mode():
            return int(model(torch.tensor([ids])).logits[0, -1].argmax())

    def wrong(ids: list[int]) -> int:
        return (right(ids) + (len(ids) % 4 == 0)) % 256

    monkeypatch.setattr(Llama, "say", staticmethod(wrong))
    monkeypatch.setattr(Generator, "say", staticmethod(right))
    monkeypatch.setattr("utils.loading.sources.gguf_file", lambda *_: tmp_path / "tiny.gguf")
    monkeypatch.setattr(app.bench.rivals, "Apart", Here)
    monkeypatch.setattr(app.bench.rivals, "onnx_folder", lambda folder, precision, *_: Path(precision))
    asked = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x"}, {"prompt": "yz"}])
    out = tmp_path / "out.json"
    args = BenchArgs(asked, methods=("ar", "spec"), gammas=(2,), repeat=1, out=out)
    args = BenchArgs(**{**vars(args), "against": "transformers,llama.cpp,onnxruntime-genai"})
    assert run_bench(SETTINGS, options, args) == 0
    told = json.loads(out.read_text())
    rows = {row["method"]: row for row in told["summary"]}
    assert list(rows)[2:] == [
        *("hf-plain", "hf-lookup", "hf-assisted", "llama-plain", "llama-lookup"),
        *("ort-int8", "ort-int8-ngram", "ort-int4", "ort-int4-ngram"),
    ]
    assert {name: row["agreement"] for name, row in rows.items()} == {
        name: 0.75 if name.startswith("llama") else 1.0 for name in rows
    }
    assert (rows["llama-plain"]["differs"], rows["llama-plain"]["other_texts"]) == (None, 2)
    assert rows["ort-int4"]["other_texts"] == 0
    assert rows["spec"]["over_rivals"]["rival"] in rows
    assert rows["llama-plain"]["prompt_per_second"] == pytest.approx(1 / READ)
    assert [note.split(":")[0] for note in told["notes"]] == [
        "llama-plain, llama-lookup",
        "ort-int8, ort-int8-ngram, ort-int4, ort-int4-ngram",
    ]
    shown = capsys.readouterr().out
    assert "float32: the share of greedy tokens" in shown
    assert "0.750" in shown


# -- the real ones ------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [LLAMA_CPP, ONNXRUNTIME])
def test_the_real_program_says_nearly_what_the_target_says(default_pair: Any, program: str) -> None:
    pytest.importorskip("llama_cpp" if program == LLAMA_CPP else "onnxruntime_genai")
    engine = PairEngine(default_pair)
    text = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": "List the days of the week, one a line."}], add_generation_prompt=True
    )
    prompt = list(text["input_ids"] if hasattr(text, "keys") else text)
    settings = SETTINGS.changed(max_new_tokens=24)
    ours = run_lane(engine.lane("ar", settings), prompt, engine.tokenizer.decode, interrupt=never)
    rivals, _ = rivals_of(engine, settings, ModelOptions(), [program], never)
    for rival in rivals.values():
        answer, again = (rival.answer(prompt, settings, engine.tokenizer.decode, never) for _ in range(2))
        assert answer.ids == again.ids
        assert answer.ids[:4] == ours.ids[:4]
        assert answer.stats.predicted_per_second
        apart = parting(ours, answer)
        assert apart is None or apart.kind == "other text"
        stopped = rival.answer(prompt, settings, engine.tokenizer.decode, after(2))
        assert stopped.interrupted
        assert stopped.ids == answer.ids[:3]
        long = rival.answer(prompt * 20, settings.changed(max_new_tokens=4), engine.tokenizer.decode, never)
        assert (len(long.ids), long.stats.prompt_n > 512) == (4, True)
    sampled = settings.changed(temperature=0.8, seed=3)
    hot, same = (rival.answer(prompt, sampled, engine.tokenizer.decode, never) for _ in range(2))
    assert hot.ids == same.ids
