"""A target that runs in a server. Knows no protocol and no text."""

from __future__ import annotations

from typing import NoReturn

from sampling.types import LM, Hidden, Rows, Session
from utils.errors import UserError
from utils.remote.server import Server


class RemoteLM(LM):
    """A server's model; satisfies :class:`sampling.types.LM`."""

    takes_trees = False
    vocab_size = 0
    context = 1 << 30

    def __init__(self, server: Server, name: str = "target") -> None:
        self.server, self.name = server, name

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> NoReturn:
        raise UserError(f"{self.server.address} answers in text: its tokens cannot be scored")
