"""A tiny pair of the module's SHAPE as folders, options, engine and catalogue."""

from pathlib import Path

import pytest

from app.lanes.lane import PairEngine
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from tests.support.scripted import catalogue_of
from tests.support.tiny import TinyPair, tiny_pair
from utils.progress import never


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Its answers never stop by themselves."""
    return tiny_pair(tmp_path_factory.mktemp("pair"), **{"stop": False, **getattr(request.module, "SHAPE", {})})


@pytest.fixture(scope="module")
def engine(pair: TinyPair) -> PairEngine:
    return load_engine(Settings(quiet=True), pair.options(), never)


@pytest.fixture
def options(pair: TinyPair) -> ModelOptions:
    return pair.options()


@pytest.fixture(scope="module")
def catalogue(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of pairs with `tiny` alone."""
    return catalogue_of(tmp_path_factory.mktemp("catalogue"), {"tiny": pair})
