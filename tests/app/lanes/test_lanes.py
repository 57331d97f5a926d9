"""Lanes over a small real pair: which texts must be plain decoding's, what outlives an answer, and which drafts become
trees under `expand auto`.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.console.chat_commands import facts
from app.lanes.answers import (
    BY_CONSTRUCTION,
    OTHER_TEXT,
    compare,
    comparisons_of,
    may_differ,
    parting,
    promise,
    run_lane,
)
from app.lanes.costs import terms_of
from app.lanes.lane import PairEngine
from app.lanes.pairing import choose_pair
from app.prompts.questions import conversation, prompt_ids
from app.screen.output import load_engine
from app.screen.view import kernels_of
from app.settings.table import ModelOptions, Settings
from app.settings.types import LANES
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.registry import ROWS
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Step
from tests.support.refusals import refused
from tests.support.tiny import TinyPair
from utils.catalogue.specs import PUBLISHED_KINDS, spec_from_argument
from utils.errors import UsageError
from utils.kernels.build import instruction_set, why_not
from utils.loading.loaded import LoadOptions
from utils.loading.loading import expanded
from utils.progress import never

SHORT = {"max_new_tokens": 24, "quiet": True}


def engine_of(pair: TinyPair, drafter: str | None = None) -> PairEngine:
    return load_engine(Settings(quiet=True), pair.options(drafter), never)


def ids_of(engine: PairEngine, name: str, settings: Settings, text: str = "tell me about it") -> tuple[int, ...]:
    return run_lane(
        engine.lane(name, settings), prompt_ids(engine, text, settings), engine.tokenizer.decode, interrupt=never
    ).ids


@pytest.mark.parametrize(
    ("dtype", "gap", "words"),
    [
        ("float32", 0.0005, "differs at token 3, top-2 gap 5.0e-04 (near tie)"),
        ("float32", 0.125, "differs at token 3, top-2 gap 0.125"),
        ("bfloat16", 0.125, "differs at token 3, top-2 gap 0.125 (within bfloat16 rounding)"),
        ("bfloat16", 20.0, "differs at token 3, top-2 gap 20.000 (beyond bfloat16 rounding)"),
    ],
)
def test_what_holds_is_said_for_the_dtype_in_use(pair: TinyPair, dtype: str, gap: float, words: str) -> None:
    """/info, the comparison of two answers and the kind of their difference, from loading on."""
    engine, settings = load_engine(Settings(quiet=True), pair.options(dtype=dtype), never), Settings(**SHORT)
    answers = []
    for name in ("ar", "spec"):
        lane, prompt = engine.lane(name, settings), prompt_ids(engine, "tell me about it", settings)
        made = run_lane(lane, prompt, engine.tokenizer.decode, interrupt=never, terms=terms_of(lane, engine))
        slow = replace(made.stats, predicted_ms=0.0, top2_gaps=(None, None, gap, *made.stats.top2_gaps[3:]))
        answers.append(replace(made, stats=slow))
    plain, other = answers
    other = replace(other, ids=(*plain.ids[:2], plain.ids[2] + 1, *plain.ids[3:]))
    (found,), parted = comparisons_of([plain, other]), parting(plain, other)
    assert parted is not None
    assert found.text == words
    assert (parted.kind == "near tie") == ("near tie" in words or "within" in words)
    chat = conversation(engine, settings)
    assert f"\noutput   {promise(dtype)}\n" in facts(engine, chat)
    assert f" own up to {dtype} rounding: logits of passes of different width differ by up to " in facts(engine, chat)


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("name", ["spec", "ngram"])
def test_greedy_lanes_give_plain_decodings_text(engine: PairEngine, name: str, gamma: int) -> None:
    settings = Settings(gamma=gamma, **SHORT)
    assert not may_differ(engine.lane(name, settings))
    assert ids_of(engine, name, settings) == ids_of(engine, "ar", settings)


@pytest.mark.parametrize("gamma", [6, "auto"])
@pytest.mark.parametrize(("name", "expand"), [("spec", "dynamic"), ("match", "dynamic")])
def test_trees_give_plain_decodings_text(engine: PairEngine, name: str, expand: str, gamma: int | str) -> None:
    settings = Settings(gamma=gamma, expand=expand, nodes=9, max_new_tokens=60, quiet=True)
    lane = engine.lane(name, settings)
    prompt = prompt_ids(engine, "one two three one two four two three one two", settings)
    steps = [event for event in lane.run(prompt) if isinstance(event, Step)]
    assert any(step.is_tree for step in steps) or gamma == "auto"
    assert max(len(step.drafted) for step in steps) <= 9
    plain = run_lane(engine.lane("ar", settings), prompt, engine.tokenizer.decode, interrupt=never).ids
    assert tuple(token for step in steps for token in step.emitted) == plain


@pytest.mark.parametrize("name", ["spec", "ngram", "maxgram", "tables"])
def test_rules_about_the_prefix_hold_in_every_lane(engine: PairEngine, name: str) -> None:
    settings = Settings(repetition_penalty=1.5, no_repeat_ngram=2, **SHORT)
    ruled = ids_of(engine, "ar", settings)
    assert ids_of(engine, name, settings) == ruled != ids_of(engine, "ar", Settings(**SHORT))
    pairs = list(pairwise(ruled))
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ngram", {}),
        ("spec", {"coupling": "gumbel"}),
        ("spec", {"draft_sampling": "greedy"}),
        ("ngram", {"gamma": "auto"}),
        ("spec", {"gamma": "auto", "coupling": "gumbel"}),
    ],
)
def test_point_mass_lanes_keep_the_text_of_the_seed_when_sampling(
    engine: PairEngine, name: str, changes: dict[str, str]
) -> None:
    settings = Settings(temperature=0.8, seed=7, **SHORT, **changes)
    assert not may_differ(engine.lane(name, settings))
    plain = ids_of(engine, "ar", settings)
    assert ids_of(engine, name, settings) == plain
    assert ids_of(engine, "ar", settings.changed(seed=8)) != plain


@pytest.mark.parametrize(("temperature", "drawn"), [(0.8, True), (0.0, False)])
def test_only_drafts_drawn_from_a_law_may_differ(engine: PairEngine, temperature: float, drawn: bool) -> None:
    settings = Settings(temperature=temperature)
    told = {name: may_differ(engine.lane(name, settings)) for name in ("ar", "spec", "ngram", "draft")}
    assert told == {"ar": False, "spec": drawn, "ngram": False, "draft": True}


def test_the_draft_lane_is_the_drafter_alone(engine: PairEngine, pair: TinyPair) -> None:
    settings = Settings(**SHORT)
    lane = engine.lane("draft", settings)
    assert (lane.shares_target, lane.drafts) == (False, False)
    model = AutoModelForCausalLM.from_pretrained(pair.drafter)
    prompt = torch.tensor([prompt_ids(engine, "tell me about it", settings)])
    wanted = model.generate(prompt, do_sample=False, max_new_tokens=24)[0, prompt.shape[1] :].tolist()
    assert list(ids_of(engine, "draft", settings)) == wanted
    assert list(ids_of(engine, "draft", settings)) == wanted  # again, on the cache it has kept


@pytest.mark.parametrize(("drafter", "kind"), [("ngram", NgramDrafter), ("none", NoDrafter)])
def test_spec_drafts_as_the_pair_says(pair: TinyPair, drafter: str, kind: type) -> None:
    engine = engine_of(pair, drafter)
    settings = Settings(**SHORT)
    assert isinstance(engine.lane("spec", settings).drafter, kind)
    assert ids_of(engine, "spec", settings) == ids_of(engine, "ar", settings)
    refused(
        engine.lanes,
        Settings(compare=("ar", "draft")),
        match=f"lane draft needs a drafter model, got drafter {drafter}",
        kind=UsageError,
    )


# -- which drafts become trees ---------------------------------------------------------------------


@pytest.fixture
def fresh(pair: TinyPair) -> PairEngine:
    """An engine whose drafters have seen nothing yet."""
    return engine_of(pair)


def test_tables_grow_under_gamma_auto_alone(fresh: PairEngine) -> None:
    for settings, grows in (
        (Settings(gamma="auto"), True),
        (Settings(gamma=4), False),
        (Settings(gamma="auto", expand="none"), False),
        (Settings(gamma=4, expand="dynamic"), True),
    ):
        for kind, row in ROWS.items():
            if row.expand == "dynamic" and kind != "static":
                assert fresh.drafters.make(kind, settings).traits.tree == grows
    assert isinstance(fresh.drafters.make("model", Settings(gamma="auto")), ModelDrafter)


# -- the default pair, its weights as the file has them -----------------------------------------------


@pytest.fixture(scope="module")
def packed() -> PairEngine:
    return load_engine(Settings(quiet=True), ModelOptions(device="cpu"), never)


@pytest.mark.skipif(instruction_set() is None, reason=f"nothing is compiled here: {why_not()}")
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.8, "coupling": "gumbel"}, {"gamma": 3, "expand": "dynamic"}],
    ids=["greedy", "gumbel", "trees"],
)
def test_the_default_pair_is_identical_by_construction_in_every_lane(
    packed: PairEngine, changes: dict[str, Any]
) -> None:
    settings = Settings(**{"gamma": "auto", "max_new_tokens": 10, "quiet": True, **changes})
    chat = conversation(packed, settings)
    prompt = chat.plan("Name three rivers.").prompt
    names = [
        name for name in LANES if name not in OTHER_TEXT and not name.endswith((*PUBLISHED_KINDS, "+model", "mtp"))
    ]
    lanes = [packed.lane(name, settings) for name in names]
    answers = [
        run_lane(lane, prompt, packed.tokenizer.decode, interrupt=never, terms=terms_of(lane, packed)) for lane in lanes
    ]
    assert {answer.ids for answer in answers} == {answers[0].ids}
    assert all(str(getattr(compare(answers[0], answer), "text", "")).endswith(BY_CONSTRUCTION) for answer in answers)
    row = instruction_set()
    assert row is not None
    assert f"\nkernels  compiled for {row.name}, 8-bit activations, the whole pass as one\n" in facts(packed, chat)
    in_torch = replace(packed.loaded.target, expanded="heads of 24")
    assert kernels_of(in_torch) == f"compiled for {row.name}, 8-bit activations; the pass in torch: heads of 24"
    assert f"\noutput   {promise('Q4_1', invariant=True)}\n" in facts(packed, chat)


def test_where_nothing_is_compiled_the_default_is_float32_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.loading.packed_gguf.load", lambda *_: False)
    monkeypatch.setattr("app.screen.view.instruction_set", lambda: None)
    for module in ("utils.loading.packed_gguf.why_not", "app.screen.view.why_not"):
        monkeypatch.setattr(module, lambda: "ziglang is not installed")
    engine = load_engine(Settings(quiet=True), ModelOptions(device="cpu", drafter="none"), never)
    assert (engine.loaded.target.precision, engine.invariant) == ("float32", False)
    assert engine.notes == ("the weights of SmolLM2-135M-Instruct are expanded to float32 (ziglang is not installed)",)
    told = facts(engine, conversation(engine, Settings()))
    assert "\nkernels  torch (ziglang is not installed)\n" in told
    assert f"\noutput   {promise('float32')}\n" in told


@pytest.mark.parametrize(
    ("options", "told", "why"),
    [
        (LoadOptions(quantization="none"), {}, ""),
        (LoadOptions(quantization="auto"), {"quantization": "Q4_1"}, ""),
        (LoadOptions(quantization="auto"), {"spec": "org/model"}, ""),
        (LoadOptions(quantization="auto", tp_size=3), {}, "3 processes share them"),
        (LoadOptions(quantization="auto"), {"device": "cuda", "dtype": "bfloat16"}, "there are no kernels for cuda"),
        (LoadOptions(quantization="auto"), {"dtype": "bfloat16"}, "the kernels compute in float32, not in bfloat16"),
        (
            LoadOptions(quantization="auto", attn_implementation="eager"),
            {},
            "--attn-implementation asks for transformers' own pass",
        ),
        (LoadOptions(quantization="auto"), {"expanded": "no kernel for IQ2_XS"}, "no kernel for IQ2_XS"),
    ],
)
def test_why_a_files_bits_are_not_left_as_they_are(
    options: LoadOptions, told: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.kernels.build.why_not", lambda: "")
    target = SimpleNamespace(
        name="m",
        quantization=told.get("quantization", "none"),
        device=torch.device(told.get("device", "cpu")),
        dtype_text=told.get("dtype", "float32"),
        expanded=told.get("expanded", ""),
    )
    said = expanded(spec_from_argument(told.get("spec", "./m.gguf")), options, target)  # type: ignore[arg-type]
    assert said == ([f"the weights of m are expanded to {target.dtype_text} ({why})"] if why else [])


def test_a_bigram_list_named_on_the_command_line_is_max_grams(pair: TinyPair, tmp_path: Path) -> None:
    """`--tables FILE`: entry i is the id behind i, 0 nothing; also for a pair whose method is its drafter."""
    file = tmp_path / "bigrams.json"
    file.write_text(json.dumps([0] * 100 + [7] * 100))
    spec = choose_pair(pair.options("maxgram", tables=str(file)))
    assert (spec.drafter, spec.tables) == ("maxgram", str(file))
    cascade = choose_pair(ModelOptions(pair="llama-2-7b-cascade", drafter="cascade", tables="~/b.json"))
    assert cascade.tables == str(Path("~/b.json").expanduser())
    engine = load_engine(Settings(quiet=True), pair.options("maxgram", tables=str(file)), never)
    tables = engine.drafters.tables()
    assert [[token for _, token, _ in tables.entries(context)] for context in ([99], [100])] == [[], [7]]
    assert ids_of(engine, "spec", Settings(**SHORT)) == ids_of(engine, "ar", Settings(**SHORT))
