"""`expand auto`: which drafts become trees, and where they stay chains because a tree could not be scored."""

from __future__ import annotations

import pytest

from app.drafters import GROWN
from app.lanes import Engine
from app.oneshot import load_engine
from app.prompts import prompt_ids
from app.settings import ModelOptions, Settings
from sampling.drafters.model import ModelDrafter
from sampling.drafters.table_tree import TableTreeDrafter
from sampling.events import Step
from sampling.loop import never
from sampling.network import TransformersNetwork
from sampling.tree_pace import RankPace
from tests.test_tree_masks import CASES
from tests.tiny import TinyPair, tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("grown"), stop=False)


@pytest.fixture
def engine(pair: TinyPair) -> Engine:
    options = ModelOptions(target=str(pair.target), drafter=str(pair.drafter), device="cpu")
    return load_engine(Settings(quiet=True), options, never)


def test_tables_grow_under_gamma_auto_alone(engine: Engine) -> None:
    for settings, grows in (
        (Settings(gamma="auto"), True),
        (Settings(gamma=4), False),
        (Settings(gamma="auto", expand="none"), False),
        (Settings(gamma=4, expand="dynamic"), True),
    ):
        for kind, grown in GROWN.items():
            if grown == "dynamic" and kind != "static":
                assert isinstance(engine.drafters.make(kind, settings), TableTreeDrafter) == grows
    model = engine.drafters.make("model", Settings(gamma="auto"))
    assert isinstance(model, ModelDrafter)
    assert model.expansion is None


def test_the_default_lane_drafts_trees_and_paces_their_nodes(engine: Engine) -> None:
    settings = Settings(gamma="auto", max_new_tokens=60, quiet=True)
    lane = engine.lane("match", settings)
    assert isinstance(lane.pace, RankPace)
    prompt = prompt_ids(engine, "one two three one two four two three one two", settings)
    steps = [event for event in lane.run(prompt) if isinstance(event, Step)]
    assert isinstance(lane.drafter, TableTreeDrafter)
    assert lane.pace.appraisal is lane.drafter.appraisal
    assert sum(len(step.drafted) for step in steps) > 0
    assert lane.drafter.appraisal.v  # what passes cost here has been told to the drafter


def test_a_target_that_takes_no_mask_gets_chains(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.drafters._target.network.takes_trees
    monkeypatch.setattr(type(engine.drafters._target.network), "takes_trees", False)
    assert not isinstance(engine.drafters.make("match", Settings(gamma="auto")), TableTreeDrafter)


@pytest.mark.parametrize("name", CASES)
def test_models_say_whether_they_take_trees(name: str) -> None:
    assert not TransformersNetwork(CASES[name][0]()).takes_trees


def test_a_usual_model_takes_trees() -> None:
    from tests.test_cache_audit import build

    assert TransformersNetwork(build("qwen2")).takes_trees
