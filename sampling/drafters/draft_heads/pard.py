"""PARD models (amd/PARD-…): small models with a mask's token, trained to draft several tokens in one pass.

After the row such a model reads masks; each is a row of an ordinary causal pass, so that their number changes no
logits. PARD (arXiv 2504.18583) reads nothing of its target: one model drafts for all targets with its vocabulary.

PARD-2 (arXiv 2605.08632; AMD-AGI/PARD, pard/pard2_infer.py) is trained with its target's states and without them.
Where `warp_model.bin` lies beside the model the embedding of the token at position p becomes

    e(x_p) + s · (W h_{p-1} + b),  h_{-1} = 0,

with the states h that the target concatenates of the layers that the configuration names; masks take the state of the
row's last token. Without that file it drafts as PARD does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.drafters.draft_heads.eagle import at
from sampling.drafters.draft_heads.published import states_read
from sampling.drafters.draft_heads.sessions import BlockCausalSession, FollowingLM, FollowingSession
from sampling.models.causal import CausalLM
from sampling.models.llama import LlamaNetwork, supports
from sampling.models.network import TransformersNetwork
from sampling.rows import put
from sampling.types import Rows, Session
from utils.errors import UserError
from utils.loading.sources import check_whole

DRAFTS = 12  # tokens of a block at most, as its authors have it
PROJECTION, LAYERS = "warp_model.bin", "pard2_target_layers"


class PardLM(CausalLM):
    """A PARD model as an LM; `mask` is the mask's id."""

    session_type = BlockCausalSession

    def __init__(self, model: Any, mask: int, name: str = "drafter", vocab_size: int | None = None) -> None:
        super().__init__(model, name, vocab_size)
        self.mask, self.block = mask, DRAFTS


class Pard2Session(BlockCausalSession, FollowingSession):
    """B rows of a PARD-2 model beside the session of its target."""

    lm: Pard2LM

    def settled(self, view: int) -> int:
        """Position p reads state p − 1, which the target has if p ≤ view."""
        return view + 1

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        lm, held = self.lm, torch.tensor(self.target.held())[:, None]
        before = torch.minimum(positions, held).minimum(positions[:, -keep, None]) - 1
        states = at(self.target.hidden(lm.reads), before)
        term = lm.projected(states * put(before >= 0, states.device)[..., None])
        with lm.embedding.register_forward_hook(lambda module, inputs, embedded: embedded + term):
            return super()._run(ids, positions, mask, keep)


class Pard2LM(FollowingLM, PardLM):
    """A PARD-2 model that reads its target's states, as an LM; alone it drafts as a PARD model.

    `weight` [H, K·G] and `bias` [H] map the states `reads` (:data:`sampling.types.Hidden`) to the model's width, times
    `scale`.
    """

    following = Pard2Session
    reviews = False

    def __init__(
        self,
        model: Any,
        mask: int,
        reads: tuple[int, ...],
        weight: Tensor,
        bias: Tensor,
        scale: float,
        name: str = "drafter",
        vocab_size: int | None = None,
    ) -> None:
        PardLM.__init__(
            self, LlamaNetwork(model) if supports(model) else TransformersNetwork(model), mask, name, vocab_size
        )
        self.embedding, self.reads_hidden = model.get_input_embeddings(), reads
        self._weight, self._bias = (scale * part.to(self.device, model.dtype) for part in (weight, bias))

    def open(self, prompt: Rows, *, target: Session | None = None, **options: Any) -> Any:
        if target is None:
            return CausalLM.open(self, prompt, **options)
        return super().open(prompt, target=target, **options)

    def projected(self, states: Tensor) -> Tensor:
        """Return the term [B, T, H] of embeddings beside the target's states [B, T, K·G]."""
        return F.linear(states.to(self._weight), self._weight, self._bias)


def pard_lm(model: Any, target: Any, name: str, vocab_size: int) -> PardLM | None:
    """Return a PARD model as an LM, which reads the states of the model `target` (None: not loaded) if it can; None for
    any other model.

    UserError for a projection that is damaged or for another target.
    """
    config: Any = getattr(model, "config", None)
    mask = getattr(config, "pard_token", None)
    if not isinstance(mask, int):
        return None
    file = Path(config.name_or_path, PROJECTION)
    if target is None or not file.is_file():
        return PardLM(model, mask, name, vocab_size)
    check_whole(file)
    stored, large = torch.load(file, map_location="cpu", weights_only=True), target.config.get_text_config()
    layers, ids = large.num_hidden_layers, getattr(config, LAYERS, None)
    if isinstance(ids, list):  # of hidden_states in transformers, from either end
        ids = [layer + (layers + 1) * (layer < 0) for layer in ids]
    reads = states_read(ids, False, LAYERS, layers, file.parent)
    weight, wanted = stored.get("target_proj.weight"), [config.hidden_size, len(reads) * large.hidden_size]
    if weight is None or [*weight.shape] != wanted:
        raise UserError(
            f"{file} is for another target: its map is {weight if weight is None else [*weight.shape]}, not {wanted} "
            "(without that file the model drafts for any target)"
        )
    bias = stored.get("target_proj.bias", torch.zeros(config.hidden_size))
    return Pard2LM(model, mask, reads, weight, bias, getattr(config, "pard2_scale", 0.02), name, vocab_size)
