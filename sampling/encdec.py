"""LM and Session over encoder-decoder models (T5 and the like). The prompt goes to the encoder, once; the rows hold
what the decoder has, from its start token on, and their cache follows by common prefix as a causal model's does.

The encoder runs when the prompt is read: the loop asks for that before the rows' first round and puts it on the
clock; scoring without having been asked does it as well. Knows no sampling and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sampling.cache import CrossCache
from sampling.causal import CausalLM, CausalSession
from sampling.encdec_network import EncDecNetwork, is_encoder_decoder
from sampling.types import Rows, Session
from utils.errors import UserError


def lm_of(model: Any, name: str = "target", vocab_size: int | None = None) -> CausalLM:
    """The LM for a transformers model of either kind (or for a :class:`sampling.types.Network`)."""
    return (EncDecLM if is_encoder_decoder(model) else CausalLM)(model, name, vocab_size)


def check_same_kind(models: list[Any]) -> None:
    """UserError if some of these LMs read the prompt with an encoder and others do not: their rows differ."""
    kinds = {bool(getattr(model, "encodes", False)): model.name for model in reversed(models)}
    if len(kinds) == 2:
        raise UserError(
            f"{kinds[True]} is an encoder-decoder model and {kinds[False]} is none: they cannot draft for each other"
        )


def go_on(session: Session, begun: Sequence[int]) -> Session:
    """`session`, its rows beginning behind ids that the decoder has of the answer already; for one prompt."""
    if begun:
        assert isinstance(session, EncDecSession)
        session.initial = [[*row, *begun] for row in session.initial]
    return session


class EncDecLM(CausalLM):
    """An encoder-decoder model by name.

    Args:
        model: a transformers encoder-decoder model. `vocab_size` as in :class:`CausalLM`.

    Raises:
        UserError: a model that has no encoder, or names no token for its decoder to start from.
    """

    encodes = True

    def __init__(self, model: Any, name: str = "target", vocab_size: int | None = None) -> None:
        if not is_encoder_decoder(model):
            raise UserError(f"{name} must be an encoder-decoder model, got {type(model).__name__}")
        super().__init__(EncDecNetwork(model), name, vocab_size)
        self.start_id = _start_id(model)

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: bool = False
    ) -> EncDecSession:
        """A session for `prompt`, which may be as long as `context`; nothing is encoded yet.

        The cache of `previous` serves again, its encoder's states included, if it was opened for the same prompt.
        """
        self.check(prompt)
        if hidden:
            raise UserError(f"{self.name} is an encoder-decoder model: it has no hidden states for a drafter to read")
        longest = max(map(len, prompt))
        if longest > self.context:
            raise UserError(f"the prompt is {longest} tokens, the encoder of {self.name} takes {self.context}")
        initial = [[self.start_id] for _ in prompt]
        if isinstance(previous, EncDecSession) and previous.source == prompt and previous.network is self.network:
            previous.initial = initial
            previous.sync(initial)
            return previous
        return EncDecSession(self.network, prompt, initial, self.vocab_size)


class EncDecSession(CausalSession):
    """B rows of one encoder-decoder model; satisfies :class:`sampling.types.Session`.

    `source` [B] are the prompts, which the encoder reads; the rows begin with `initial`.
    """

    network: EncDecNetwork
    _cache: CrossCache

    def __init__(self, network: Any, source: Rows, initial: Rows, vocab_size: int) -> None:
        self.source = source
        super().__init__(network, initial, vocab_size, hidden=False)

    def read(self) -> int:
        """Run the encoder if it has not run; the number of tokens it read, of the longest prompt."""
        return self.network.read(self._cache, self.source)

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        self.read()
        return super()._run(ids, positions, mask, keep)

    def _reset(self, rows: int) -> None:
        """An empty cache; what the encoder made of the prompts stays."""
        old = getattr(self, "_cache", None)
        super()._reset(rows)
        if old is not None and old.encoded is not None:
            self._cache.encoded = old.encoded.bare()

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.source = [self.source[row] for row in rows.tolist()]

    def _blank(self) -> EncDecSession:
        return EncDecSession(self.network, self.source, self.initial, self.vocab_size)

    def kv(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        raise UserError("an encoder-decoder model has no keys and values for a drafter to read")

    def hidden(self) -> Tensor:
        raise UserError("an encoder-decoder model has no hidden states for a drafter to read")


def _start_id(model: Any) -> int:
    """The token that the decoder starts from."""
    for config in (getattr(model, "generation_config", None), model.config):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    raise UserError(f"{type(model).__name__} names no decoder_start_token_id: its decoder cannot start")
