"""docs/models.md says of every architecture what its small model shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models_table import table, written

PAGE = Path("docs/models.md")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_table_of_models_is_what_they_show() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page, table())
