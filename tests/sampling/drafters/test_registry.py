"""One row a drafter: lanes, --drafter, completion, titles, catalogue and the documents' table say the same."""

import re
from pathlib import Path
from typing import Any

import pytest

from app.lanes.pairing import catalogue_in
from sampling.drafters import registry
from sampling.drafters.draft_model import NoDrafter
from sampling.drafters.registry import DRAFTERS, MEMBERS, REVIEWERS, ROWS
from sampling.events import Step
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.types import Limits
from tests.support.runs import sampler
from tests.support.tiny import tiny_model
from utils.catalogue.heads import HEAD_KINDS

ROOT = Path(__file__).parents[3]
PAGES = [page for page in map(ROOT.joinpath, ("README.md", "docs/drafters.md", "docs/reference.md")) if page.exists()]
TABLE = re.compile(r"^\| *(?:drafter|word) *\|.*\n\|[-| ]+\n((?:\|.*\n)+)", re.MULTILINE | re.IGNORECASE)


def test_the_documents_tables_have_every_word_of_a_drafter_and_no_other() -> None:
    """Combinations may stand there or be told in a sentence."""
    texts = [table for page in PAGES for table in TABLE.findall(page.read_text(encoding="utf-8"))]
    first = [" ".join(line.split("|")[1] for line in table.splitlines()) for table in texts]
    told = [found for cells in first if {"ngram", "maxgram"} <= (found := set(re.findall("`([^`]+)`", cells)))]
    alone = {word for word, _, _, _ in registry.table()}
    assert told
    for words in told:
        assert {word for word in words if "+" not in word} - {"none"} == alone - {"none"}
        assert words <= set(ROWS)


def test_the_drafter_of_the_recipe_drafts() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    recipe = page.partition("### Add a drafter")[2].partition("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", recipe, re.DOTALL)
    names: dict[str, Any] = {"__name__": "last_time"}
    exec(code, names)
    lm, limits = CausalLM(tiny_model(0)), Limits(20, frozenset(), 512)
    events = [
        list(generate(lm, [[1, 2, 3], [4]], drafter, sampler(0.8, 3), limits))
        for drafter in (names["build"](None, None), NoDrafter())
    ]
    drafted, plain = ([step for step in found if isinstance(step, Step)] for found in events)
    assert sum(len(step.drafted) for step in drafted) > 20
    for row in (0, 1):
        texts = [[id_ for step in steps if step.row == row for id_ in step.emitted] for steps in (drafted, plain)]
        assert texts[0] == texts[1]
        assert len(texts[0]) == 20


@pytest.mark.parametrize("word", DRAFTERS)
def test_the_catalogue_takes_every_word(word: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    heads = ", ".join(f"{kind}: {kind}" for kind in HEAD_KINDS)
    cascade = "cascade: [plain, maxgram], k_matrix: [[1, 2], [0, 3]]"
    file.write_text(f"pairs:\n  a: {{target: org/a, drafter: {word}, students: {{{heads}}}, {cascade}}}\n")
    assert catalogue_in(file).pair().drafter == word


def test_a_word_of_no_drafter_is_a_model() -> None:
    assert not {"tabels", "match"} & set(DRAFTERS)
    assert set(REVIEWERS) < set(MEMBERS)
