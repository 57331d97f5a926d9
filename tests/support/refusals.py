"""What a person reads where something cannot be done: one line."""

from collections.abc import Callable
from typing import Any

import pytest

from utils.errors import UserError


def refused(
    call: Callable[..., Any], *given: Any, match: str | None = None, kind: type[Exception] = UserError, **named: Any
) -> str:
    """Return the line of the error in which the call ends; it must match the pattern."""
    with pytest.raises(kind, match=match) as raised:
        call(*given, **named)
    assert "\n" not in str(raised.value)
    return str(raised.value)
