"""The lanes of cascades and of drafters by look-up, over small real models from a catalogue of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.command_line.main import main
from app.lanes.answers import Answer, may_differ, run_lane
from app.lanes.lane import Lane, PairEngine
from app.lanes.pairing import catalogue_in
from app.prompts.questions import prompt_ids
from app.screen.output import load_engine
from app.settings.table import Layers, ModelOptions, Settings
from sampling.events import Step
from tests.app.lanes.test_draft_heads import write_student
from tests.support.refusals import refused
from tests.support.runs import crossed
from tests.support.tiny import noisy_copy, tiny_model, tiny_pair, tiny_tokenizer
from utils.errors import UsageError
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair
from utils.progress import never

CPU = LoadOptions(device="cpu")
SHORT: dict[str, Any] = {"max_new_tokens": 24, "quiet": True}
K_TWO = ((3, 4, 5), (0, 2, 3), (0, 0, 4))
PAIRS = """\
default: two
pairs:
  two:
    target: ./target
    cascade: [./drafter, ./small, maxgram]
    method: cascade
    k_matrix: [[3, 4, 5], [0, 2, 3], [0, 0, 4]]
    lenience: 2
  chained:
    target: ./target
    cascade: [./drafter, maxgram]
    method: chain
    k_matrix: [[2, 3], [0, 3]]
  beside:
    target: ./target
    drafter: ./drafter
    tables: tables.bin
    students: {plain: plain, glide: glide, feature: feature}
    cascade: [glide, maxgram]
    k_matrix: [[2, 3], [0, 3]]
  unloaded:
    target: ./target
    cascade: [./small, maxgram]
    k_matrix: [[2, 3], [0, 3]]
  mag:
    target: ./target
    method: maxgram
  taught:
    target: ./target
    cascade: [{path: ./glide, name: taught}, maxgram]
    method: cascade
    k_matrix: [[2, 3], [0, 3]]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue with all that it names beside it."""
    home = tmp_path_factory.mktemp("cascades")
    tiny_pair(home, stop=False)
    target = tiny_model()
    target.lm_head.weight.data[2] = 0.0  # as the pair's target: its stop token is out of reach
    noisy_copy(target, 0.05, seed=4).save_pretrained(home / "small")
    tiny_tokenizer().save_pretrained(home / "small")
    for kind in ("plain", "glide", "feature"):
        write_student(home / kind, kind, target)
    (home / "text.txt").write_text("one and one is two and two is three and the end " * 9)
    words = ["distill", "--stage", "tables", "--data", str(home / "text.txt"), "--out", str(home / "made"), "--quiet"]
    assert main([*words, "--target", str(home / "target"), "--device", "cpu"]) == 0
    (home / "made" / "tables.bin").rename(home / "tables.bin")
    (home / "models.yaml").write_text(PAIRS)
    return home


@pytest.fixture(scope="module")
def engines(folder: Path) -> Callable[[str], PairEngine]:
    """The engine of a pair, loaded once."""
    found: dict[str, PairEngine] = {}

    def engine(name: str) -> PairEngine:
        if name not in found:
            found[name] = load_engine(
                Settings(quiet=True), ModelOptions(models=str(folder / "models.yaml"), pair=name, device="cpu"), never
            )
        return found[name]

    return engine


def answer(engine: PairEngine, lane: Lane, settings: Settings, text: str = "tell me", **watching: Any) -> Answer:
    return run_lane(lane, prompt_ids(engine, text, settings), engine.tokenizer.decode, interrupt=never, **watching)


def steps_of(engine: PairEngine, lane: Lane, settings: Settings) -> list[Step]:
    events: list[Any] = []
    answer(engine, lane, settings, show=events.append)
    return [event for event in events if isinstance(event, Step)]


# -- loading --------------------------------------------------------------------------------------


def test_vocabulary_and_context_are_cut_to_the_smallest_of_all(folder: Path, tmp_path: Path) -> None:
    wide = tiny_model(context=256)
    wide.resize_token_embeddings(320)
    wide.save_pretrained(tmp_path / "wide")
    tiny_tokenizer().save_pretrained(tmp_path / "wide")
    tiny_model(context=128).save_pretrained(tmp_path / "brief")
    tiny_tokenizer().save_pretrained(tmp_path / "brief")
    (tmp_path / "models.yaml").write_text(
        "pairs:\n  a:\n    target: ./wide\n    method: cascade\n    k_matrix: [[1, 2, 3], [0, 1, 2], [0, 0, 1]]\n"
        f"    cascade: [{folder / 'drafter'}, ./brief, maxgram]\n"
    )
    pair = load_pair(catalogue_in(tmp_path / "models.yaml").pair(), CPU)
    assert (pair.target.vocab_size, pair.vocab_size, pair.context) == (320, 300, 128)
    assert pair.notes[1:] == ("brief has a context of 128 tokens, wide 256: the pair runs with 128",)


def test_a_trained_drafter_is_no_model_of_a_cascade(folder: Path) -> None:
    told = r"^taught is a trained glide drafter: name its folder in the pair's students"
    refused(load_pair, catalogue_in(folder / "models.yaml").pair("taught"), CPU, match=told)


# -- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "coupling": "gumbel"}])
@pytest.mark.parametrize(("name", "gamma"), crossed(["spec", "cascade", "chain", "maxgram", "match"], [1, "auto"]))
def test_lanes_of_a_two_model_cascade_give_plain_decodings_text(
    engines: Callable[[str], PairEngine], name: str, gamma: int | str, more: dict[str, Any]
) -> None:
    engine, settings = engines("two"), Settings(gamma=gamma, **SHORT, **more)
    lane = engine.lane(name, settings)
    assert not may_differ(lane)
    assert answer(engine, lane, settings).ids == answer(engine, engine.lane("ar", settings), settings).ids


@pytest.mark.parametrize(
    "name",
    [
        "static",
        "match",
        "suffix",
        "maxgram",
        "cascade",
        "chain",
        "match+plain",
        "match+glide",
        "match+feature",
        "tables+feature",
        "match+model",
    ],
)
@pytest.mark.parametrize("changes", [{}, {"cascade": "model,glide,feature", "k_matrix": K_TWO, "lenience": 3}])
def test_every_new_lane_is_exact_with_tables_and_trained_drafters(
    engines: Callable[[str], PairEngine], name: str, changes: dict[str, Any]
) -> None:
    engine, settings = engines("beside"), Settings(**SHORT, **changes)
    lane = engine.lane(name, settings)
    session = engine.open(prompt_ids(engine, "tell me", settings), hidden=lane.drafter.traits.needs_hidden)
    plain = answer(engine, engine.lane("ar", settings), settings).ids
    assert answer(engine, lane, settings).ids == plain
    events = list(lane.run(prompt_ids(engine, "tell me", settings), session=session))
    assert tuple(token for step in events if isinstance(step, Step) for token in step.emitted) == plain


def test_the_pairs_own_cascade_reviews_and_ignores_gamma(engines: Callable[[str], PairEngine]) -> None:
    engine = engines("two")
    for lane in [engine.lane("spec", Settings(gamma=gamma, **SHORT)) for gamma in (1, 9)]:
        assert (lane.takes_gamma, lane.drafts, lane.drawn_drafts) == (False, True, True)
        assert lane.source_names == ("drafter", "small", "maxgram")
        assert lane.most == engine.lane("cascade", Settings()).most
        steps = steps_of(engine, lane, lane.settings)
        assert {step.gamma for step in steps[1:]} == {lane.most}
        assert any(inner.inner for step in steps for inner in step.inner)  # the small model under the large one
    chain = engines("chained").lane("spec", Settings())
    assert (chain.takes_gamma, chain.most, chain.source_names) == (False, 5, ("drafter", "maxgram"))
    assert all(len(step.drafted) <= 5 and not step.inner for step in steps_of(engines("chained"), chain, Settings()))


def test_under_auto_a_cascade_drafts_whole_or_not_at_all(engines: Callable[[str], PairEngine]) -> None:
    engine, settings = engines("two"), Settings(gamma="auto", max_new_tokens=80, quiet=True)
    lane = engine.lane("cascade", settings)
    steps = steps_of(engine, lane, settings)
    assert lane.pace is not None
    assert {step.gamma for step in steps} <= {0, lane.most}
    assert engine.lane("cascade", settings).pace is lane.pace


def test_a_cascade_has_trained_drafters_of_its_own_and_is_made_anew_when_it_changes(
    engines: Callable[[str], PairEngine],
) -> None:
    engine, settings = engines("beside"), Settings()
    names = ("glide", "match+glide", "cascade", "chain")
    prompt = prompt_ids(engine, "tell me", settings)
    lanes = [engine.lane(name, settings) for name in names]
    sessions = []
    for lane in lanes:
        session = engine.open(prompt)
        lane.drafter.start([prompt], session, session)
        sessions += [id(one) for one in lane.drafter.sessions]
    assert len(set(sessions)) == 4
    first = lanes[2].drafter
    assert engine.lane("cascade", settings.changed(gamma=9, ngram_n=5, temperature=1)).drafter is first
    for change in ({"cascade": "glide,tables"}, {"k_matrix": "[[2,4],[0,3]]"}, {"lenience": 2}):
        assert engine.lane("cascade", settings.changed(**change)).drafter is not first
        first = engine.lane("cascade", settings).drafter


# -- what is refused ------------------------------------------------------------------------------


ROWS = "k_matrix must have 3 rows for the cascade drafter,small,maxgram"
UNNAMED = "pair 'mag' names none (infer.py distill --student glide makes one)"
TWO_ROWS = "[[2,6],[0,6]]"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("two", "cascade", {"k_matrix": TWO_ROWS}, f"{ROWS}, got 2"),
    ("two", "chain", {"k_matrix": "[[2]]"}, f"{ROWS}, got 1"),
    ("two", "cascade", {"cascade": "small"}, "k_matrix must have 1 row for the cascade small, got 3"),
    (
        "two",
        "cascade",
        {"cascade": "drafter,tiny,maxgram"},
        "lane cascade: no model tiny is loaded for the cascade, have drafter, small",
    ),
    ("two", "chain", {"cascade": "model,small,maxgram"}, "lane model needs a drafter model, pair 'two' has none"),
    (
        "unloaded",
        "cascade",
        {},
        "lane cascade: no model small is loaded for the cascade, have none (--drafter cascade loads it)",
    ),
    ("mag", "chain", {}, "lane chain needs drafters, pair 'mag' names none (--cascade model,maxgram …)"),
    ("mag", "chain", {"cascade": "ngram"}, "lane chain needs a k_matrix with 1 row for the cascade ngram, got none"),
    (
        "mag",
        "static",
        {},
        "lane static needs n-gram tables, pair 'mag' has none (infer.py distill --stage tables builds some)",
    ),
    ("mag", "match+glide", {}, f"no glide drafter: {UNNAMED}"),
    ("mag", "cascade", {"cascade": "glide,maxgram", "k_matrix": TWO_ROWS}, f"no glide drafter: {UNNAMED}"),
]


@pytest.mark.parametrize(("name", "lane", "changes", "told"), REFUSED)
def test_what_the_pair_cannot_run_is_one_line(
    engines: Callable[[str], PairEngine], name: str, lane: str, changes: dict[str, Any], told: str
) -> None:
    assert refused(engines(name).lane, lane, Settings(**changes), kind=UsageError) == told


def test_the_setting_outranks_the_pair_and_empty_means_the_pairs(engines: Callable[[str], PairEngine]) -> None:
    engine = engines("beside")
    assert engine.lane("chain", Settings()).source_names == ("glide", "maxgram", "bigram")
    own = Settings(cascade="model,plain,ngram", k_matrix=K_TWO)
    assert engine.lane("cascade", own).source_names == ("drafter", "plain", "ngram")
    layers = Layers.of(pair_defaults=engine.loaded.spec.defaults)
    assert layers.settings.show("cascade") == "glide,maxgram"
    assert layers.settings.show("k_matrix") == "[[2,3],[0,3]]"


# -- the console ----------------------------------------------------------------------------------
