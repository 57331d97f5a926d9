"""Gemma 4's assistants: models that compute queries only and read their target's keys and values (transformers'
`gemma4_assistant`).

For a draft the assistant reads the embedding of the token before it, joined with a state: for the first draft the
target's last state, then its own output for the draft before. Its layers attend to the keys and values of the target's
last layer of the same kind, from the same position for all drafts. So it has no cache and reads no prompt. Knows no
distributions.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from sampling.models.causal import CausalLM, CausalSession
from sampling.models.network import TransformersNetwork
from sampling.types import LM, Draft, Hidden, Rows, Session
from utils.errors import UserError
from utils.loading.loaded import context_of
from utils.objects import HfModel


def is_assistant(model: HfModel) -> bool:
    """Whether a loaded model drafts from its target's keys and values."""
    return str(getattr(getattr(model, "config", None), "model_type", "")).endswith("_assistant")


class _Chain(NamedTuple):
    """The results after the tokens that the target holds: the tokens read, and the last one's logits [V] and state
    [1, 1, H]."""

    held: list[int]
    read: list[int]
    logits: Tensor
    state: Tensor


class AssistantSession(Session):
    """B rows of an assistant beside the session of its target. A row that does not continue the one read before is read
    again after the tokens that the target holds."""

    def __init__(self, lm: "AssistantLM", prompt: Rows, target: CausalSession) -> None:
        self.lm, self.initial, self.target, self.described = lm, prompt, target, lm.name
        self.vocab_size, self.device = target.vocab_size, lm.device
        self._chains: dict[int, _Chain] = {}  # by row

    def rollback(self, rows: Rows) -> list[int]:
        """Nothing has to be cropped."""
        return [len(row) - 1 for row in rows]

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """[B, 1, V] logits after each row; `draft` is empty."""
        return torch.stack([self._after(index, row) for index, row in enumerate(rows)])[:, None, : self.vocab_size]

    @torch.inference_mode()
    def _after(self, index: int, row: list[int]) -> Tensor:
        count = max(1, min(self.target.held()[index], len(row) - 1))
        held, steps = row[:count], row[count:]
        chain = self._chains.get(index)
        if chain is None or chain.held != held or chain.read != steps[: len(chain.read)]:
            state = self.target.hidden((-1,))[index : index + 1, count - 1 : count]
            chain = _Chain(held, [], state, state)
        for end in range(len(chain.read) + 1, len(steps) + 1):
            logits, state = self.lm.step(steps[end - 1], chain.state, self._seen(index, count))
            chain = _Chain(held, steps[:end], logits, state)
        self._chains[index] = chain
        return chain.logits

    def _seen(self, index: int, count: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Keys and values [1, H_kv, count, D] of the target's first tokens, by the kind of layer."""
        own, like = slice(index, index + 1), self.lm.model.dtype
        held = {kind: self.target.kv(layer)[:2] for kind, layer in self.lm.reads.items()}
        return {kind: (k[own, :, :count].to(like), v[own, :, :count].to(like)) for kind, (k, v) in held.items()}

    def select(self, rows: Tensor) -> None:
        self._chains = {}

    def fork(self) -> Self:
        """An independent session."""
        return type(self)(self.lm, self.initial, self.target)


class AssistantLM(LM):
    """An assistant as an LM, beside its target. UserError for a target of another width, without a layer of a kind
    that the assistant reads, or run by anything but transformers."""

    encodes, reads_kv, reviews, block = False, True, False, 0
    reads_hidden: Hidden = (-1,)

    def __init__(self, model: HfModel, target: CausalLM, name: str = "drafter") -> None:
        network, own = target.network, model.config
        if not isinstance(network, TransformersNetwork):
            raise UserError(f"{name} reads keys and values of a Gemma 4 target, which this one is not")
        config, size = network.config, own.backbone_hidden_size
        if size != config.hidden_size:
            raise UserError(f"{name} is for a target of hidden size {size}, this one has {config.hidden_size}")
        kinds = list(getattr(config, "layer_types", None) or [])
        kinds = kinds[: len(kinds) - (getattr(config, "num_kv_shared_layers", 0) or 0)]
        wanted = {*own.get_text_config().layer_types}
        if not wanted <= {*kinds}:
            raise UserError(f"{name} reads layers of {', '.join(sorted(wanted))}, which its target has not all")
        self.reads = {kind: len(kinds) - 1 - kinds[::-1].index(kind) for kind in {*wanted, *kinds}}
        self.model, self.name, self.vocab_size = model, name, target.vocab_size
        self.context, self.device = context_of(own.get_text_config()), model.device
        self._embed = network.model.get_input_embeddings()

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> AssistantSession:
        """Return a session beside `target`; UserError for one that does not keep its last hidden states."""
        if not isinstance(target, CausalSession) or -1 not in target.keeps_hidden:
            raise UserError(f"{self.name} reads its target's session: it cannot run alone")
        return AssistantSession(self, prompt, target)

    def step(self, token: int, state: Tensor, seen: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Read `token` joined with a state [1, 1, H]; return logits [V], and the state to join with the next token."""
        count = next(iter(seen.values()))[0].shape[2]
        embedded = self._embed(torch.tensor([[token]], device=state.device)).to(state)
        out = self.model(
            inputs_embeds=torch.cat((embedded, state), dim=-1).to(self.model.dtype),
            position_ids=torch.tensor([[count]], device=self.device),
            shared_kv_states=seen,
            use_cache=False,
        )
        return out.logits[0, 0], out.last_hidden_state
