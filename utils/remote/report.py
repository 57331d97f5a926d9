"""What a server says of an answer that it gave. Knows no server and no figures of our own."""

from __future__ import annotations

from typing import NamedTuple


class Report(NamedTuple):
    """What a server says of an answer; None where it says nothing. `problem`: why the answer broke off, in a line.

    `passes` are runs of its target that verified drafts.
    """

    tokens: int | None = None
    prompt_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    passes: int | None = None
    problem: str = ""
