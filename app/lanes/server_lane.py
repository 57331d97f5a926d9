"""The lane of a server: it sends the chat's messages and yields the answer's pieces of text as rounds.

A piece is a Step without a draft and without a call, as nothing runs on this machine. Its time is measured by this
program, from the request on; the server's own figures come with the end. Knows no terminal and no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sampling.events import Event, Finished, Step
from utils.errors import UsageError
from utils.loading.loaded import NO_LIMIT
from utils.progress import never
from utils.remote.pieces import Pieces
from utils.remote.server import ChatAnswer, Message, Server

if TYPE_CHECKING:
    from app.settings.table import Settings

SENT = ("temperature", "top_p", "seed")
FURTHER = {"top_k": ("top_k", 0), "min_p": ("min_p", 0.0), "repetition_penalty": ("repetition_penalty", 1.0)}
"""Settings that the protocol has no field for: the field of engines that have one, and the value that is off."""

ALL = {"vLLM": -1, "SGLang": -1, "llama-server": 0, "llama-cpp-python": 0}
"""Engines that take those fields, and how each spells that every token may be drawn. Left out, an engine's own
defaults would hold."""


@dataclass(frozen=True)
class ServerLane:
    """A server's answers. `pieces` gives their texts ids."""

    name: str
    server: Server
    settings: Settings
    pieces: Pieces
    shares_target: bool = False
    source_names: tuple[str, ...] = ()
    drafts: bool = False
    drawn_drafts: bool = False
    beams: None = None
    pace: None = None
    context: int = NO_LIMIT

    def run(
        self,
        prompt: list[int],
        *,
        session: None = None,
        interrupt: Callable[[], bool] = never,
        messages: Sequence[Message] = (),
        **_: Any,
    ) -> Iterator[Event]:
        """Yield the server's answer to the chat. UserError if it fails before the first piece."""
        answer = ChatAnswer(self.server, messages, options_for(self.server, self.settings), interrupt)
        for text, seconds in answer:
            yield piece(self.pieces.id_of(text), seconds)
        yield Finished(0, answer.reason, answer.report)


def piece(token: int, seconds: float) -> Step:
    """Return a piece of text as a round."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("drafted", "parents", "source", "path", "target_p", "draft_p", "calls"), ()
    )
    return Step(0, gamma=0, token=token, top2_gap=None, draft_s=0.0, verify_s=seconds, sample_s=0.0, **nothing)


def options_for(server: Server, settings: Settings) -> dict[str, Any]:
    """The settings as a request has them. UsageError for one that the server has no field for."""
    options = {name: getattr(settings, name) for name in SENT} | {"max_tokens": settings.max_new_tokens}
    if server.kind in ALL:
        fields = {field: getattr(settings, name) for name, (field, _) in FURTHER.items()}
        fields["top_k"] = fields["top_k"] or ALL[server.kind]
        if server.kind.startswith("llama"):
            fields["repeat_penalty"] = fields.pop("repetition_penalty")
        return {**options, "extra_body": fields}
    for name, (_, off) in FURTHER.items():
        if getattr(settings, name) != off:
            raise UsageError(f"{server.address} has no field for {name} (now {settings.show(name)})")
    return options


def server_lane(name: str, server: Server, settings: Settings, pieces: Pieces) -> ServerLane:
    """Return the lane of a server. UsageError for a setting that no server has."""
    if settings.no_repeat_ngram or not settings.chat:
        setting = "chat" if not settings.chat else "no_repeat_ngram"
        raise UsageError(f"lane {name}: a server has no {setting} (now {settings.show(setting)})")
    return ServerLane(name, server, settings, pieces)
