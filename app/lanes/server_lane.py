"""The lane of a server: it sends the chat's messages and yields the answer's pieces of text as rounds.

A piece is a Step without a draft and without a call: nothing runs here. Its clock is ours, from the request on; what
the server itself says of the answer comes with the end. Knows no terminal and no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sampling.events import Event, Finished, Step
from utils.errors import UsageError
from utils.loading.loaded import NO_LIMIT, LoadedModel, LoadedPair
from utils.progress import never
from utils.remote.pieces import Pieces, PieceTokenizer
from utils.remote.server import ChatAnswer, Message, Server

if TYPE_CHECKING:
    from app.settings.table import Settings
    from utils.catalogue.specs import PairSpec

SENT = ("temperature", "top_p", "seed")
UNSENT = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram": 0, "chat": True}
"""Settings that the protocol has no field for, by the value that changes nothing."""


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
        """The server's answer to the chat. UserError where it fails before the first piece."""
        options = {name: getattr(self.settings, name) for name in SENT}
        options["max_tokens"] = self.settings.max_new_tokens
        answer = ChatAnswer(self.server, messages, options, interrupt)
        for text, seconds in answer:
            yield piece(self.pieces.id_of(text), seconds)
        yield Finished(0, answer.reason, answer.report)


def piece(token: int, seconds: float) -> Step:
    """A piece of text as a round."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("drafted", "parents", "source", "path", "target_p", "draft_p", "calls"), ()
    )
    return Step(0, gamma=0, token=token, top2_gap=None, draft_s=0.0, verify_s=seconds, sample_s=0.0, **nothing)


def server_lane(name: str, server: Server, settings: Settings, pieces: Pieces) -> ServerLane:
    """The lane of a server. UsageError for a setting that its protocol cannot carry."""
    for unsent, off in UNSENT.items():
        if getattr(settings, unsent) != off:
            raise UsageError(f"lane {name}: OpenAI's protocol has no {unsent} (now {settings.show(unsent)})")
    return ServerLane(name, server, settings, pieces)


def served_pair(spec: PairSpec) -> LoadedPair:
    """The pair whose target a server runs. UserError for a server that is absent or refuses."""
    import torch

    target = spec.target
    server = Server(str(target.url), target.model, target.key_env)
    model = LoadedModel(
        model=server,
        name=server.chosen or target.name,
        parameters=0,
        bytes=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantization="none",
        context=NO_LIMIT,
        vocab_size=0,
        seconds=0.0,
    )
    return LoadedPair(
        spec=spec,
        target=model,
        drafter=None,
        drafter_kind="none",
        tokenizer=PieceTokenizer(Pieces(0)),
        stop_ids=frozenset(),
        vocab_size=0,
        context=NO_LIMIT,
    )
