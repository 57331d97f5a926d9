"""The settings of cascades: read, shown, refused in one line, completed, and taken over from the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.arguments import read_request
from app.cli import layers_of
from app.pairing import choose_pair
from app.settings import Layers, ModelOptions, Settings
from tests.test_commands import ScriptedConsole, offered, transcript
from utils.catalogue import load_catalogue
from utils.errors import UsageError

NAMES = (
    "cascade must be a comma list of model, plain, glide, feature, tables, ngram, maxgram or names of the pair's "
    "models, each once, large to small"
)
K_THREE = ((5, 14, 10), (0, 1, 10), (0, 0, 10))


@pytest.mark.parametrize(
    ("name", "value", "read", "shown"),
    [
        ("cascade", "glide,maxgram", ("glide", "maxgram"), "glide,maxgram"),
        ("cascade", " llama-160m , maxgram ", ("llama-160m", "maxgram"), "llama-160m,maxgram"),
        ("cascade", ["model", "maxgram"], ("model", "maxgram"), "model,maxgram"),
        ("cascade", "", (), "(none)"),
        ("k_matrix", "[[5, 14, 10], [0, 1, 10], [0, 0, 10]]", K_THREE, "[[5,14,10],[0,1,10],[0,0,10]]"),
        ("k_matrix", [[2, 6], [0, 6]], ((2, 6), (0, 6)), "[[2,6],[0,6]]"),
        ("k_matrix", "", (), "(none)"),
        ("lenience", "2", 2.0, "2"),
        ("lenience", 1, 1.0, "1"),
    ],
)
def test_a_value_is_read_and_shown_so_that_it_can_be_typed_again(name: str, value: Any, read: Any, shown: str) -> None:
    settings = Settings().changed(**{name: value})
    assert (getattr(settings, name), settings.show(name)) == (read, shown)
    assert getattr(Settings().changed(**{name: shown}), name) == read


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("cascade", "glyde,maxgram", f"{NAMES} (did you mean glide?), got 'glyde,maxgram' (still plain,maxgram)"),
        ("cascade", "GLIDE", f"{NAMES} (did you mean glide?), got 'GLIDE' (still plain,maxgram)"),
        ("cascade", "glide,glide", f"{NAMES}, got 'glide,glide' (still plain,maxgram)"),
        ("cascade", "glide,", f"{NAMES}, got 'glide,' (still plain,maxgram)"),
        ("cascade", ["a,b"], f"{NAMES}, got ['a,b'] (still plain,maxgram)"),
        ("cascade", 5, f"{NAMES}, got 5 (still plain,maxgram)"),
        (
            "k_matrix",
            "5,10",
            "k_matrix must be rows of whole numbers like [[5,10],[0,10]], upper triangular, got '5,10' "
            "(still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[5,10]",
            "k_matrix must be rows of whole numbers like [[5,10],[0,10]], got '[5,10]' (still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[[5,10],[3,10]]",
            "k_matrix must be upper triangular: row 2, column 1 must be 0, got '[[5,10],[3,10]]' "
            "(still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[[5,10],[10]]",
            "k_matrix must be square: 2 rows, but one of them has 1 numbers, got '[[5,10],[10]]' "
            "(still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[[-1]]",
            "k_matrix must be whole numbers from 0 to 1000, got '[[-1]]' (still [[5,10],[0,10]])",
        ),
        (
            "k_matrix",
            "[" * 100_000,
            "k_matrix must be rows of whole numbers like [[5,10],[0,10]], upper triangular, got "
            f"'{'[' * 38}… (still [[5,10],[0,10]])",
        ),
        ("lenience", "0.5", "lenience must be from 1 to 1000000, got 0.5 (still 1)"),
        ("lenience", "1e400", "lenience must be from 1 to 1000000, got 1e400 (still 1)"),
        ("lenience", "much", "lenience must be a number from 1 to 1000000, got 'much' (still 1)"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_refused_value_says_what_is_allowed_and_what_holds(name: str, value: Any, told: str) -> None:
    settings = Settings(cascade="plain,maxgram", k_matrix="[[5,10],[0,10]]")
    with pytest.raises(UsageError) as raised:
        settings.changed(**{name: value})
    assert str(raised.value) == told


def test_flags_and_variables_set_them() -> None:
    words = ["run", "hi", "--cascade", "glide,maxgram", "--k-matrix", "[[2,6],[0,6]]", "--lenience", "2"]
    request = read_request([*words, "--compare", "ar,cascade,chain"], {"SPEC_LENIENCE": "3"})
    settings = layers_of(request).settings
    assert (settings.cascade, settings.k_matrix, settings.lenience) == (("glide", "maxgram"), ((2, 6), (0, 6)), 2.0)
    environ = {"SPEC_CASCADE": "plain,maxgram", "SPEC_K_MATRIX": "[[1,2],[0,3]]", "SPEC_LENIENCE": "4"}
    found = Layers.of(environ=environ).settings
    assert (found.cascade, found.k_matrix, found.lenience) == (("plain", "maxgram"), ((1, 2), (0, 3)), 4.0)
    with pytest.raises(UsageError, match=r"^--k-matrix must be upper triangular: row 2, column 1 must be 0, got "):
        Layers.of(flags={"k_matrix": "[[1,2],[3,4]]"})
    with pytest.raises(UsageError, match=r"^--k-matrix needs a value: rows of whole numbers like "):
        read_request(["run", "--k-matrix"], {})


@pytest.mark.parametrize("word", ["maxgram", "cascade", "chain"])
def test_they_are_drafters_of_any_pair(word: str) -> None:
    assert choose_pair(ModelOptions(pair="smollm2", drafter=word)).drafter == word
    own = choose_pair(ModelOptions(pair="llama-2-7b-cascade", drafter="cascade"))
    assert (own.drafter, own.method) == ("cascade", "cascade")


def test_the_pairs_keys_are_defaults_that_its_own_defaults_outrank(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "defaults: {lenience: 5, gamma: 2}\n"
        "pairs:\n  a:\n    target: org/a\n    cascade: [org/b, {id: org/c, name: see}, maxgram]\n"
        "    k_matrix: [[1, 2, 3], [0, 1, 2], [0, 0, 1]]\n    lenience: 3\n    defaults: {lenience: 4}\n"
        "  b:\n    target: org/b\n    defaults: {cascade: [model, maxgram], k_matrix: '[[1, 2], [0, 3]]'}\n"
    )
    pairs = load_catalogue(file).pairs
    first, second = (Layers.of(pair_defaults=pairs[name].defaults) for name in "ab")
    assert first.settings.show("cascade") == "b,see,maxgram"
    assert first.settings.show("k_matrix") == "[[1,2,3],[0,1,2],[0,0,1]]"
    assert (first.settings.lenience, first.settings.gamma, first.source("cascade")) == (4.0, 2, "pair")
    assert second.settings.show("cascade") == "model,maxgram"
    assert (second.settings.show("k_matrix"), second.settings.lenience) == ("[[1,2],[0,3]]", 5.0)


SCRIPT = """
> /cascade
cascade = (none)
> /cascade glide,maxgram
cascade = glide,maxgram
> /k_matrix
k_matrix = (none)
> /k_matrix [[5, 10], [0, 10]]
k_matrix = [[5,10],[0,10]]
> /k_matrix [[5,10],[1,10]]
error: k_matrix must be upper triangular: row 2, column 1 must be 0, got '[[5,10],[1,10]]' (still [[5,10],[0,10]])
> /lenience 2.5
lenience = 2.5
> /lenience 0
error: lenience must be from 1 to 1000000, got 0 (still 2.5)
> /set cascade=plain,glide,maxgram k_matrix=[[5,14,10],[0,1,10],[0,0,10]] lenience=3
cascade = plain,glide,maxgram
k_matrix = [[5,14,10],[0,1,10],[0,0,10]]
lenience = 3
> /set cascade=plain k_matrix=[[1,2]]
error: k_matrix must be square: 1 rows, but one of them has 2 numbers, got '[[1,2]]' (still [[5,14,10],[0,1,10],[0,0,10]])
> /reset k_matrix
k_matrix = (none)
> /reset
cascade = (none)
lenience = 1
> /help lenience
/lenience [X]
  how much drafters let pass; 1: nothing
  setting lenience: a number from 1 to 1000000
  now 1, default 1
"""  # noqa: E501


def test_a_console_sets_them_one_after_the_other() -> None:
    assert transcript(SCRIPT) == SCRIPT.strip()


def test_tab_goes_through_the_list_and_offers_published_matrices() -> None:
    words = ["model", "plain", "glide", "feature", "tables", "ngram", "maxgram"]
    assert offered("/cascade ") == [f"/cascade {word}" for word in words]
    assert offered("/cascade glide,m") == ["/cascade glide,model", "/cascade glide,maxgram"]
    assert offered("/set cascade=model,p") == ["/set cascade=model,plain"]
    assert offered("/k_matrix [[13") == ["/k_matrix [[13,10],[0,10]]"]
    assert offered("/drafter c") == ["/drafter cascade", "/drafter chain"]
    assert offered("/compare match,match+g") == ["/compare match,match+glide"]


def test_tab_knows_the_models_of_the_pairs_cascade() -> None:
    from app.completion import completions

    console = ScriptedConsole(cascade="llama-160m,maxgram")
    line = "/cascade l"
    assert [found.text for found in completions(line, len(line), console)] == ["llama-160m"]
