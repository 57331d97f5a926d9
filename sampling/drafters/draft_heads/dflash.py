"""Heads that draft a whole block in one pass: DFlash, JetSpec, DFlare, Domino, DSpark, DFlash2 and P-EAGLE
(z-lab/dflash, deepseek-ai/DeepSpec, *speculators*).

The rows of a block are the last token, which the target has not read, and masks after it. In every layer they attend to
the target's states, fused to one state a token, and to each other. The keys and values of the target's states stay in
the cache, those of the block's rows do not.

* DFlash draws a position's draft independently of the drafts before it.
* JetSpec (hao-ai-lab/JetSpec, arXiv 2606.18394) is DFlash whose rows see no later row, in training too.
* DFlare (Tencent/AngelSlim, arXiv 2606.02091): each layer reads its own weighted mean of the target's states, which
  separate weights map to keys and values.
* Domino (arXiv 2605.29707; SpecForge's draft/domino.py) adds to a position's logits a map of its state and of a GRU's
  state after all tokens since the last one that the target has read; the first drafts may go without it.
* DSpark's Markov head adds to a position's logits a term of the token before: of that token alone (`vanilla`), gated by
  the position's state (`gated`), or of all tokens since the last one that the target has read (`rnn`). Its confidence
  head estimates, before a draft is drawn, its chance of acceptance; a chain that ends by this estimate stays exact.
* DFlash2 has a convolution over the block's rows around each sublayer, and a selector that scores a position's
  likeliest tokens again by the token before.

Trees of DFlash, JetSpec and DFlare combine the independent distributions of the positions (DDTree). For Domino and
DSpark each path has its own distributions, for DFlash2 its own scores of the candidates.

A P-EAGLE head is an EAGLE-3 head whose rows are tokens, each with the target's states one position before, and then
masks, each with the mask's embedding and one learned state instead. All rows are causal. The last token's row yields
the first draft, each mask's row the next one; the masks' rows leave the cache.

PARD models (amd/PARD-…) are small models with a mask token. After the row such a model reads mask tokens; the pass is
causal, so that their number changes no logits. PARD (arXiv 2504.18583) reads nothing of its target:
one model drafts for all targets with its vocabulary. PARD-2 (arXiv 2605.08632; AMD-AGI/PARD, pard/pard2_infer.py) is
trained with its target's states and without them. If `warp_model.bin` lies beside the model, the embedding of the
token at position p becomes

    e(x_p) + s · (W h_{p-1} + b),  h_{-1} = 0,

with h the target's states at the layers that the configuration names, concatenated; mask tokens take the state before
the row's last token. Without that file the model drafts as PARD does.

Shapes: B rows, C positions of context that are new, R rows of a block, H the head's width, n ids of its output layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sampling.drafters.draft_heads.config import BlockConfig
from sampling.drafters.draft_heads.eagle import FeatureSession, at
from sampling.drafters.draft_heads.modules import Convolution, DraftHead
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_heads.published import states_read
from sampling.drafters.draft_heads.sessions import BlockCausalSession, FollowingLM, FollowingSession, HeadParts
from sampling.models.cache import additive
from sampling.models.causal import CausalLM, CausalSession
from sampling.models.llama import LlamaNetwork, norm_of, side_by_side, supports
from sampling.models.network import TransformersNetwork
from sampling.rows import put
from sampling.types import Draft, Rows
from sampling.vocabulary import best
from utils.errors import UserError
from utils.loading.sources import check_whole


class BlockNetwork(StudentNetwork):
    """The pass of a block head over the target's states and the rows of a block."""

    # Corrects the logits [M, n] of M drafts by the drafts before them; None if they do not depend on these. Arguments:
    # those logits, the ids [M, k] from the last token to the one before the draft, and the states [M, k, H] of the
    # drafts after each id. If the last token's row yields no draft, that token comes twice, first with its own state,
    # as in training.
    corrected: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    # Maps the states [M, H] of drafts and the ids [M] before them to the logits [M] of their chances of acceptance.
    confidence: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self, student: DraftHead) -> None:
        super().__init__(student)
        self.config, trunk = cast(BlockConfig, student.config), cast(Any, student.model)
        self._fc = self._take(trunk.fc) if hasattr(trunk, "fc") else nn.Identity()
        self._hidden_norm, self._readers = norm_of(trunk.hidden_norm, self._frozen), self._layers
        self.width = student.lm_head.out_features

    def remember(self, features: Tensor, positions: Tensor, cache: Any) -> None:
        """Append the keys and values of the target's states [B, C, K·G] at positions [B, C] to the cache."""
        fused = self.fused(features.to(self.device, self.dtype))
        rotation = self._angles(positions, fused[0])
        for index, (layer, x) in enumerate(zip(self._readers, fused, strict=True)):
            layer.remember(x, rotation, cache, index)

    def fused(self, features: Tensor) -> list[Tensor]:
        """Return the input [B, C, H] of each layer, fused from the target's states [B, C, K·G]."""
        return [self._hidden_norm(self._fc(features))] * self.layers

    def block(self, ids: Tensor, positions: Tensor, seen: dict[int, Tensor | None], cache: Any) -> Tensor:
        """Run ids [B, R] at positions [B, R] through all layers → normed states [B, R, H]. `seen`: the attention mask
        of the layers with each window."""
        x = self.embed(ids)
        rotation = self._angles(positions, x)
        for index, layer in enumerate(self._layers):
            x = layer.mlp(layer.attend(x, rotation, seen[self.config.windows[index]], cache, index))
        return self._norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """Map normed states [..., H] to logits [..., n]."""
        return cast(Tensor, self._head(states))


class DFlashSession(BlockCausalSession, FollowingSession):
    """B rows of a DFlash head. Between passes its cache holds the tokens that the target has read, and nothing else."""

    network: BlockNetwork
    states: Tensor  # [B, R, H] of the last block

    @property
    def by_path(self) -> bool:
        return self.network.corrected is not None

    def final_positions(self, view: int) -> int:
        """Return the number of final positions: position p reads state p."""
        return view

    def mask_tokens(self, count: int) -> int:
        """Return the number of mask tokens for `count` drafts: as many as in training, since the rows of a block see
        each other. JetSpec's rows see no later row, so that `count` drafts need no further ones."""
        config = self.network.config
        return count - config.from_anchor if config.kind == "jetspec" else config.mask_tokens

    def score_reduced(self, rows: Rows, draft: Draft) -> Tensor:
        """Return [B, N+1, n] logits of the block's last N + 1 rows: each row's last token and N mask tokens."""
        logits = super().score_reduced(rows, draft)
        self._settle([[] for _ in rows])
        self._crop([min(pair) for pair in zip(map(len, rows), self.target.held(), strict=True)])
        return logits

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        network, held = self.network, torch.tensor(self.target.held())
        count = keep - 1 + max(0, int((positions[:, -keep] + 1 - held).max()))  # rows of the block; none in a prompt
        new, before = ids.shape[1] - count, self._cache.length
        if new:
            fed = positions[:, :new]
            network.remember(at(self.target.hidden(self.lm.reads), fed), put(fed, self.device), self._cache)
        if not count:
            return torch.zeros(len(ids), keep, network.width, device=ids.device, dtype=network.dtype), None
        seen, where = self._seen(positions, mask, new, before), put(positions[:, new:], self.device)
        self.states = network.block(ids[:, new:], where, seen, self._cache)[:, -keep:]
        return network.logits(self.states), None

    def _seen(self, positions: Tensor, mask: Tensor | None, new: int, before: int) -> dict[int, Tensor | None]:
        """Return by window the attention mask of a block's rows (`positions` from `new` on); None: all is seen."""
        rows, count, config = len(positions), positions.shape[1] - new, self.network.config
        open_ = (
            torch.ones(rows, count, before + positions.shape[1], dtype=torch.bool)
            if mask is None
            else mask[:, 0, new:].cpu() == 0
        )
        where = torch.cat((torch.arange(before).expand(rows, -1), positions), dim=1)
        attention_masks: dict[int, Tensor | None] = {}
        for window in {*config.windows}:
            seen, causal = open_.clone(), config.causal_head or (window and config.causal)
            seen[..., -count:] = torch.ones(count, count).tril(0 if causal else count).bool()
            if window:
                seen &= (where >= positions[:, new : new + 1] - window)[:, None]
            attention_masks[window] = None if bool(seen.all()) else additive(seen, self.network)
        return attention_masks

    def _before(self, places: list[int], paths: Rows) -> tuple[Tensor, Tensor]:
        """Return the ids [M, k] before each draft of these paths and the drafts' states [M, k, H]."""
        lead, device = self.states.shape[1] - self.lm.block, self.states.device
        tokens = put([path[:lead] + path for path in paths], device)
        return tokens, self.states[put(places, device), : tokens.shape[1]]

    def logits_after(self, places: list[int], paths: Rows) -> Tensor:
        logits, correct = super().logits_after(places, paths), self.network.corrected
        return logits if correct is None else correct(logits, *self._before(places, paths))

    @torch.no_grad()
    def confidence(self, places: list[int], paths: Rows) -> list[float] | None:
        if self.network.confidence is None:
            return None
        tokens, states = self._before(places, paths)
        return cast("list[float]", torch.sigmoid(self.network.confidence(states[:, -1], tokens[:, -1])).tolist())


class DFlareNetwork(BlockNetwork):
    """The pass of a DFlare head."""

    def __init__(self, student: DraftHead) -> None:
        super().__init__(student)
        trunk, take = cast(Any, student.model), self._take
        self._shares = trunk.layer_fusion_weights.softmax(dim=1)
        joined = [
            side_by_side([take(own.self_attn.k_proj_target), take(own.self_attn.v_proj_target)]) for own in trunk.layers
        ]
        self._readers = [replace(layer, qkv=qkv, heads=0) for layer, qkv in zip(self._layers, joined, strict=True)]

    def fused(self, features: Tensor) -> list[Tensor]:
        states = features.unflatten(-1, (self._shares.shape[1], -1))
        return list(self._hidden_norm(torch.einsum("bckg,lk->lbcg", states, self._shares)))


class DominoNetwork(BlockNetwork):
    """The pass of a Domino head."""

    def __init__(self, student: DraftHead) -> None:
        super().__init__(student)
        trunk = cast(Any, student.model)
        self._memory, (first, activation, last) = trunk.prefix_gru, trunk.embed_proj
        self._correct = nn.Sequential(self._take(first), activation, self._take(last))

    @torch.no_grad()
    def corrected(self, logits: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
        tokens = tokens[:, 1 - self.config.from_anchor :]
        if tokens.shape[1] <= self.config.uncorrected:
            return logits
        _, memory = self._memory(self.embed(tokens))
        correction: Tensor = self._correct(torch.cat((states[:, -1], memory[0]), dim=-1))
        return logits + correction[:, : logits.shape[1]]


class DSparkNetwork(BlockNetwork):
    """The pass of a DSpark head."""

    def __init__(self, student: DraftHead) -> None:
        super().__init__(student)
        self.markov = cast(Any, student.model).markov_head if self.config.markov else None
        self._onto_ids = self._take(self.markov.markov_w2) if self.markov else None
        self.confidence = student.confidence if self.config.confidence else None

    @torch.no_grad()
    def corrected(self, logits: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
        if self.markov is None:
            return logits
        state = states.new_zeros(len(states), self.config.rank)
        for step in range(0 if self.config.markov == "rnn" else tokens.shape[1] - 1, tokens.shape[1]):
            latent, state = self.markov.step(tokens[:, step], states[:, step], state)
        term: Tensor = cast(Any, self._onto_ids)(latent)
        return logits + term[:, : logits.shape[1]]


class Around:
    """A convolution before a sublayer and after it; the coefficients of both follow from the sublayer's input."""

    def __init__(
        self, convolution: Convolution, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]
    ) -> None:
        self._convolution, self._before, self._after = convolution, before, after

    def enter(self, x: Tensor) -> Tensor:
        """Return the normed and mixed input of a sublayer; [B, R, H] both."""
        x = self._before(x)
        first, self._last = self._convolution.coefficients(x)
        return cast(Tensor, self._convolution(x, first))

    def leave(self, x: Tensor) -> Tensor:
        """Return the mixed output of the sublayer that was entered last; [B, R, H] both."""
        return cast(Tensor, self._convolution(self._after(x), self._last))


class DFlash2Network(BlockNetwork):
    """The pass of a DFlash2 head."""

    def __init__(self, student: DraftHead) -> None:
        super().__init__(student)
        trunk = cast(Any, student.model)
        for index, (layer, own) in enumerate(zip(self._layers, trunk.layers, strict=True)):
            mixed = Around(own.attention_conv, layer.before, layer.o)
            further = Around(own.mlp_conv, layer.after, layer.down)
            ends: Any = {"o": mixed.leave, "down": further.leave}
            self._layers[index] = replace(layer, before=mixed.enter, after=further.enter, **ends)
        self.selector = trunk.candidate_selector

    @torch.no_grad()
    def corrected(self, logits: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
        """Score the likeliest ids of logits [M, n] again by the last of the ids before; −∞ for all others."""
        values, ids = best(logits, self.config.choices)
        scores = values + self.selector(tokens[:, -1], states[:, -1], ids)
        return torch.full_like(logits, float("-inf")).scatter(1, ids, scores)


class PEagleSession(BlockCausalSession, FeatureSession):
    """B rows of a P-EAGLE head."""

    score_reduced = CausalSession.score_reduced  # [B, N+1, n] after each row and each mask token of a draft

    def _joined(self, embedded: Tensor, before: Tensor) -> Tensor:
        """Join tokens [B, T, H] with the target's states in slots [B, T], or the mask's."""
        states = at(self.target.hidden(self.lm.reads), before).to(embedded)
        unread = put((before >= torch.tensor(self.target.held())[:, None])[..., None], self.device)
        return self.network.join_target(embedded, torch.where(unread, self.network.mask_hidden, states))


class BlockLM(FollowingLM):
    """A head that drafts a block in one pass, as an LM."""

    parts: Mapping[str, HeadParts] = {
        "peagle": (StudentNetwork, PEagleSession),
        "dflash": (BlockNetwork, DFlashSession),
        "jetspec": (BlockNetwork, DFlashSession),
        "dflare": (DFlareNetwork, DFlashSession),
        "domino": (DominoNetwork, DFlashSession),
        "dspark": (DSparkNetwork, DFlashSession),
        "dflash2": (DFlash2Network, DFlashSession),
    }
    reviews = False


DRAFTS = 12  # the most tokens of a PARD model's block, as in its authors' code


class PardLM(CausalLM):
    """A PARD model as an LM; `mask_token_id` fills its block."""

    session_type = BlockCausalSession

    def __init__(self, model: Any, mask_token_id: int, name: str = "drafter", vocab_size: int | None = None) -> None:
        super().__init__(model, name, vocab_size)
        self.mask_token_id, self.block = mask_token_id, DRAFTS


class Pard2Session(BlockCausalSession, FollowingSession):
    """B rows of a PARD-2 model beside the session of its target."""

    lm: "Pard2LM"

    def _run(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
        lm, held = self.lm, torch.tensor(self.target.held())[:, None]
        before = torch.minimum(positions, held).minimum(positions[:, -keep, None]) - 1
        states = at(self.target.hidden(lm.reads), before).to(lm.weight) * put(before >= 0, self.device)[..., None]
        term = nn.functional.linear(states, lm.weight, lm.bias)
        with lm.embedding.register_forward_hook(lambda module, inputs, embedded: embedded + term):
            return super()._run(ids, positions, mask, keep)


class Pard2LM(FollowingLM, PardLM):
    """A PARD-2 model that reads its target's states, as an LM.

    `weight` [H, K·G] and `bias` [H] map the states `reads` (:data:`sampling.types.Hidden`) to the model's width, times
    `scale`.
    """

    following = Pard2Session
    reviews = False

    def __init__(
        self,
        model: Any,
        mask_token_id: int,
        reads: tuple[int, ...],
        weight: Tensor,
        bias: Tensor,
        scale: float,
        name: str = "drafter",
        vocab_size: int | None = None,
    ) -> None:
        PardLM.__init__(
            self,
            LlamaNetwork(model) if supports(model) else TransformersNetwork(model),
            mask_token_id,
            name,
            vocab_size,
        )
        self.embedding, self.reads_hidden = model.get_input_embeddings(), reads
        self.weight, self.bias = (scale * part.to(self.device, model.dtype) for part in (weight, bias))


def pard_lm(model: Any, target: Any, name: str, vocab_size: int) -> PardLM | None:
    """Return a PARD model as an LM, which reads the states of the model `target` (None: not loaded) if it can; None for
    any other model.

    UserError for a projection that is damaged or for another target.
    """
    config: Any = getattr(model, "config", None)
    mask_token_id = getattr(config, "pard_token", None)
    if not isinstance(mask_token_id, int):
        return None
    file = Path(config.name_or_path, "warp_model.bin")
    if not hasattr(target, "config") or not file.is_file():
        return PardLM(model, mask_token_id, name, vocab_size)
    check_whole(file)
    stored, large = torch.load(file, map_location="cpu", weights_only=True), target.config.get_text_config()
    layers, ids = large.num_hidden_layers, getattr(config, "pard2_target_layers", None)
    # These ids number transformers' hidden_states, negative ones from the end.
    if isinstance(ids, list) and all(isinstance(layer, int) for layer in ids):
        ids = [layer + (layers + 1) * (layer < 0) for layer in ids]
    reads = states_read(ids, False, "pard2_target_layers", layers, file.parent)
    weight, wanted = stored.get("target_proj.weight"), [config.hidden_size, len(reads) * large.hidden_size]
    if weight is None or [*weight.shape] != wanted:
        raise UserError(
            f"{file} is for another target: its map is {weight if weight is None else [*weight.shape]}, not {wanted} "
            "(without that file the model drafts for any target)"
        )
    bias = stored.get("target_proj.bias", torch.zeros(config.hidden_size))
    if [*bias.shape] != wanted[:1]:
        raise UserError(f"{file} is damaged: target_proj.bias has the shape {[*bias.shape]}, not {wanted[:1]}")
    return Pard2LM(model, mask_token_id, reads, weight, bias, getattr(config, "pard2_scale", 0.02), name, vocab_size)
