"""Warming a pair up: what it measures seeds `gamma auto`, and what the cache folder holds can do no harm."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest

from app.lanes.lane import PairEngine
from app.lanes.pairing import choose_pair
from app.lanes.warm import FILE, REMEMBERED, Measured, warm_up
from app.settings.table import Settings
from sampling.events import Step
from tests.support.tiny import tiny_pair
from utils.catalogue.specs import ModelSpec, PairSpec
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PairSpec:
    return choose_pair(tiny_pair(tmp_path_factory.mktemp("warm"), stop=False).options())


def engine_of(spec: PairSpec) -> PairEngine:
    return PairEngine(load_pair(spec, LoadOptions(device="cpu")))


def steps(engine: PairEngine) -> list[Step]:
    return [
        event
        for event in engine.lane("spec", Settings(gamma="auto", max_new_tokens=24)).run([5, 6, 7, 8])
        if isinstance(event, Step)
    ]


def test_the_first_round_of_the_first_answer_drafts(spec: PairSpec, cache: Path) -> None:
    """Of the first round that may: the opening one reads the prompt."""
    loaded = replace(engine_of(spec).loaded, drafter=None, drafter_word="ngram")
    assert steps(PairEngine(loaded))[1].gamma == 0, "nothing is known of costs: a plain pass is timed first"
    engine = PairEngine(loaded)
    warm_up(engine)
    assert steps(engine)[1].gamma > 0


def test_measurements_of_a_machine_and_pair_are_kept(spec: PairSpec, cache: Path) -> None:
    for _ in range(REMEMBERED + 2):
        engine = engine_of(spec)
        warm_up(engine)
    ((key, starts),) = json.loads((cache / FILE).read_text()).items()
    assert len(starts) == REMEMBERED
    assert engine.loaded.target.name in key
    assert engine.measured is not None
    assert engine.measured.plain == starts[-1]["passes"]["1"]


def test_drafters_whose_files_have_one_name_share_no_measurements(spec: PairSpec, cache: Path) -> None:
    assert isinstance(spec.drafter, ModelSpec)
    for folder in ("one", "two"):
        place = copytree(str(spec.drafter.path), cache / folder / "drafter")
        warm_up(engine_of(spec.model_copy(update={"drafter": ModelSpec(path=str(place))})))
    assert [len(starts) for starts in json.loads((cache / FILE).read_text()).values()] == [1, 1]


def test_a_start_beside_a_busy_program_takes_the_costs_of_earlier_starts() -> None:
    quiet, faster = Measured({1: 2.0, 4: 2.2, 8: 3.0}, 0.6), Measured({1: 1.5, 4: 2.25, 8: 3.0}, 0.6)
    busy = Measured({1: 3.0, 4: 4.5, 8: 9.0}, 3.0)
    assert quiet.beside([]) == quiet
    assert quiet.beside([faster, faster]) == quiet, "memory is slower today: wide passes cost less beside a plain one"
    after = busy.beside([quiet, busy, quiet])
    assert (after.passes, after.drafted) == (pytest.approx({1: 3.0, 4: 3.3, 8: 4.5}), pytest.approx(0.9))


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"x": {}}', "KEY"])
def test_a_damaged_file_or_a_folder_that_cannot_be_written_harms_nothing(
    content: str, spec: PairSpec, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    engine = engine_of(spec)
    if content == "KEY":
        warm_up(engine)
        (key,) = json.loads((cache / FILE).read_text())
        (cache / FILE).write_text(json.dumps({key: [{"passes": {"1": -1, "2": "x"}, "drafted": None}, 7]}))
    else:
        (cache / FILE).write_text(content)
    warm_up(engine)
    assert engine.measured is not None
    monkeypatch.setenv("SPEC_CACHE_DIR", "/proc/none")
    warm_up(engine)
    assert engine.measured.plain > 0


def test_warming_up_leaves_what_drafters_keep_as_it_was(spec: PairSpec, cache: Path) -> None:
    cold, warm = engine_of(spec), engine_of(spec)
    warm_up(warm)
    settings = Settings(gamma=3, max_new_tokens=24)
    texts = [
        [event.emitted for event in engine.lane("spec", settings).run([5, 6, 7, 8]) if isinstance(event, Step)]
        for engine in (cold, warm)
    ]
    assert texts[0] == texts[1]


def test_a_pair_without_a_drafter_is_warmed_up_too(spec: PairSpec, cache: Path) -> None:
    engine = PairEngine(replace(engine_of(spec).loaded, drafter=None, drafter_word="none"))
    warm_up(engine)
    assert engine.measured is not None
    assert engine.measured.drafted is None
