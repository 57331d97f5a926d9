"""The forward pass of Llama-like models, written out by hand as a `Network`.

Same arithmetic as transformers' own forward (Llama, Mistral without sliding window, Qwen2 without sliding layers), with
less overhead: grouped-query attention without expanding K and V, a cache of preallocated slots, only the wanted logits.
It uses the model's own modules. Of their matrices it copies only quantized ones of the same input, to join them for
one product. Keeps no state between passes. The draft heads' pass (sampling/drafters/draft_heads/network.py) uses its
parts.

:class:`FixedNetwork` runs a pass of T tokens at the least of WIDTHS that holds them, over the first `reach` slots of
the cache: tokens beyond T are padding, whose slots the next pass writes again, and the mask hides absent tokens. Longer
passes over the same cache, and passes over several rows, run as the network itself runs them. The caller's `capture`
records a pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sampling.models.cache import Buffer, SlotCache, joined, outside_inference_mode
from sampling.types import Hidden, KVCache, states_of
from sampling.vocabulary import single_thread_if_small
from utils.families import is_fixed
from utils.kernels.quantized_linear import PackedWeight, QuantizedLinear
from utils.objects import HfConfig, HfModel

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def supports(model: object) -> bool:
    """Whether `LlamaNetwork` computes exactly what `model` does.

    True for the families above on one device, with SiLU, full attention in every layer and
    rotary frequencies that do not depend on the length.
    """
    config: HfConfig = getattr(model, "config", None)
    return (
        type(model).__name__ in FAMILIES
        and type(model).__module__.startswith("transformers.")
        and config.hidden_act in ("silu", "swish")
        and is_fixed(getattr(config, "rope_parameters", None))
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and not (type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None)
        and (getattr(model, "tp_size", None) or 1) == 1  # else several processes share it
        and len(set((getattr(model, "hf_device_map", None) or {}).values())) <= 1
    )


class LlamaNetwork:
    """A Llama-like transformers model as a function of new tokens and a `SlotCache`.

    It uses the model's modules in place, so the model itself keeps working. Pack the model first
    (`utils.kernels.quantized_linear.pack`) for speed on the CPU; its weights must not change after that.

    Raises:
        ValueError: `supports` refuses the model.
    """

    def __init__(self, model: nn.Module) -> None:
        if not supports(model):
            raise ValueError(f"{type(model).__name__} is not of the Llama kind that this network computes")
        trunk: HfModel = model.model
        config: HfConfig = model.config
        self._embed = cast(nn.Embedding, trunk.embed_tokens)
        table = self._embed.weight
        self.device, self.dtype = table.device, table.dtype
        self._rotary = trunk.rotary_emb
        self._head = cast(nn.Module, model.lm_head)
        self._norm = norm_of(trunk.norm, isinstance(self._head, QuantizedLinear))
        self.layers = int(config.num_hidden_layers)
        self._layers = [LlamaLayer.of(layer) for layer in trunk.layers[: self.layers]]
        self.vocab_size = int(config.vocab_size)
        self.context = int(config.max_position_embeddings)
        self.slot = (self._layers[0].shared, 0, self._layers[0].size)  # [heads, 0, D] of the keys or values of no slots

    takes_trees, ragged, reduced_ids = True, None, None

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache; the first pass decides its number of rows."""
        return SlotCache(self.layers)

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        keep: int,
        hidden: Hidden = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Feed ids [B, T] at positions [B, T]; append T slots to `cache`.

        mask [B, 1, T, S+T] additive, under which every token sees at least one slot, or None = every token sees all
        S slots, its predecessors and itself. Returns logits [B, keep, V] of the last `keep` columns and the states
        that `hidden` names: for −1 those *after* the final norm, i.e. exactly the head's input
        (transformers' `hidden_states[-1]`).
        """
        assert isinstance(cache, SlotCache)
        new = ids.shape[1]
        x = self._embed(ids)
        cos, sin = angles_of(self._rotary, positions).to(x.dtype)[:, :, None].chunk(2, dim=-1)
        bias = causal_bias(new, cache.length, x) if mask is None else mask
        wanted, states = states_of(hidden), dict[int, Tensor]()
        for index, layer in enumerate(self._layers):
            if index in wanted:
                states[index] = x
            x = layer.mlp(layer.attend(x, (cos, sin), bias, cache, index))
        x = states[-1] = self._norm(x if -1 in wanted else x[:, new - keep :])
        kept = x[:, x.shape[1] - keep :].contiguous()  # else the head's weight would be copied for each row
        return self._head(kept), joined([states[state] for state in wanted]) if wanted else None


def angles_of(rotary: HfModel, positions: Tensor) -> Tensor:
    """Return cos and signed sin [..., 2D] of positions [...]; the first half of sin is negative, see `rotate`."""
    angle = positions[..., None].float() * rotary.inv_freq
    cos, sin = angle.cos(), angle.sin()
    return cast(Tensor, torch.cat((cos, cos, -sin, sin), dim=-1) * rotary.attention_scaling)


def causal_bias(new: int, cached: int, like: Tensor) -> Tensor | None:
    """The additive mask [1, 1, T, S+T] that hides each new token's successors; None for a single token."""
    if new == 1:
        return None
    return like.new_full((new, cached + new), -torch.inf).triu_(cached + 1)[None, None]


Map = Callable[[Tensor], Tensor]


def norm_of(module: HfModel, frozen: bool) -> Map:
    """x / rms(x) · weight over the last dimension, from a module with a weight and an epsilon; an Identity stays, and a
    norm of several parts (sampling/drafters/draft_heads/modules.py).

    For a frozen module twice as fast: rms(x) = hypot(‖x‖, √(εH)) / √H, with √H taken into the weight.
    """
    if isinstance(module, nn.Identity) or getattr(module, "parts", 1) > 1:
        return cast(Map, module)
    eps = float(module.variance_epsilon)
    if not frozen:
        return lambda x: F.rms_norm(x, module.weight.shape, module.weight, eps)
    size = module.weight.numel()
    weight = module.weight.detach() * math.sqrt(size)
    least = torch.tensor(math.sqrt(eps * size), dtype=weight.dtype)
    return lambda x: (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(least)).mul_(weight)


def side_by_side(linears: list[nn.Module]) -> Map:
    """x → the outputs of `linears`, concatenated: one product where all of them are quantized."""
    if all(isinstance(linear, QuantizedLinear) and linear.bias is None for linear in linears):
        joined = PackedWeight.joined([cast(QuantizedLinear, linear).packed for linear in linears])
        if joined is not None:
            return QuantizedLinear(joined)
    return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)


def as_it_is(linear: nn.Module) -> nn.Module:
    return linear


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One decoder layer: x + attention(norm(x)), then + mlp(norm(x))."""

    before: Map  # the norm before attention
    qkv: Map
    o: nn.Module
    after: Map  # the norm before the MLP
    gate_up: Map
    down: nn.Module
    heads: int
    shared: int  # heads of K and V
    size: int  # D, of one head
    scale: float
    window: int = 0  # how many slots back its attention looks; 0 = to the beginning
    enter: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # x → the input of q, k, v, and the residual
    norms: tuple[Map, Map] | None = None  # of each head of q and of k
    first: int = 0  # cached slots before it are not looked at

    @staticmethod
    def of(
        module: HfModel,
        take: Callable[[nn.Module], nn.Module] = as_it_is,
        window: int = 0,
        enter: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
        first: int = 0,
    ) -> "LlamaLayer":
        """The layer of a model's module. `take` replaces its linear maps, for example by packed ones."""
        attention, mlp = module.self_attn, module.mlp
        shared = attention.k_proj.out_features // attention.head_dim
        reading = [take(linear) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        frozen, normed = isinstance(reading[0], QuantizedLinear), getattr(attention, "q_norm", None) is not None
        return LlamaLayer(
            before=norm_of(module.input_layernorm, frozen),
            qkv=side_by_side(reading),
            o=take(attention.o_proj),
            after=norm_of(module.post_attention_layernorm, frozen),
            gate_up=side_by_side([take(mlp.gate_proj), take(mlp.up_proj)]),
            down=take(mlp.down_proj),
            heads=shared * attention.num_key_value_groups,
            shared=shared,
            size=attention.head_dim,
            scale=attention.scaling,
            window=window,
            enter=enter,
            norms=(norm_of(attention.q_norm, frozen), norm_of(attention.k_norm, frozen)) if normed else None,
            first=first,
        )

    def attend(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], bias: Tensor | None, cache: SlotCache, index: int
    ) -> Tensor:
        """x + self-attention, [B, T, H]; appends the keys and values of x to layer `index` of `cache`."""
        rows, new, _ = x.shape
        read, x = (self.before(x), x) if self.enter is None else self.enter(x)
        qkv = self.qkv(read).view(rows, new, -1, self.size)
        turning = qkv[:, :, : self.heads + self.shared]
        if self.norms is not None:
            each = zip(self.norms, turning.split([self.heads, self.shared], dim=2), strict=True)
            turning = torch.cat([norm(part) for norm, part in each], dim=2)
        turned = rotate(turning, rotation).transpose(1, 2)  # q and k [B, heads, T, D]
        fresh = qkv[:, :, self.heads + self.shared :].transpose(1, 2)
        keys, values = cache.append(index, turned[:, self.heads :], fresh)
        if self.first and keys.shape[2] > new:
            keys, values, bias = latest(keys.shape[2] - self.first, keys, values, bias)
        same_for_all = bias is None or bias.shape[0] == 1  # a bias of ragged rows hides slots beyond the window itself
        if self.window and same_for_all and keys.shape[2] >= self.window + new:
            keys, values, bias = latest(self.window + new - 1, keys, values, bias)
        query = turned[:, : self.heads]
        with single_thread_if_small(query.numel() * keys.shape[2]):  # neighbouring heads of the query share keys
            mixed = F.scaled_dot_product_attention(query, keys, values, bias, scale=self.scale, enable_gqa=True)
        return cast(Tensor, x + self.o(mixed.transpose(1, 2).reshape(rows, new, -1)))

    def remember(self, context: Tensor, rotation: tuple[Tensor, Tensor], cache: SlotCache, index: int) -> None:
        """Append keys and values of `context` [B, T, H], without this layer's norm, to layer `index` of `cache`."""
        qkv = self.qkv(context).view(*context.shape[:2], -1, self.size)
        keys, values = qkv[:, :, self.heads :].chunk(2, dim=2)
        keys = keys if self.norms is None else self.norms[1](keys)
        cache.append(index, rotate(keys, rotation).transpose(1, 2), values.transpose(1, 2))

    def mlp(self, x: Tensor) -> Tensor:
        """x + MLP, [B, T, H] both."""
        gate, up = self.gate_up(self.after(x)).chunk(2, dim=-1)
        return cast(Tensor, x + self.down(F.silu(gate).mul_(up)))


def latest(count: int, keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The last `count` slots of keys and values [B, heads, S, D] and of a bias [.., T, S]; views."""
    return keys[:, :, -count:], values[:, :, -count:], None if bias is None else bias[..., -count:]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of heads [B, T, heads, D]: (a, b) → (a·cos − b·sin, b·cos + a·sin) for the halves a, b."""
    cos, signed_sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


# -- passes of fixed width over a preallocated cache, which a device can replay: shapes and addresses never change

WIDTHS = (*range(1, 17), 32)
REACHES = tuple(256 << step for step in range(12))  # slots that attention reads
Passed = tuple[Tensor, Tensor | None]  # logits, and states if wanted
Capture = Callable[[Callable[[], Passed]], Callable[[], Passed]]  # a pass → the function that replays it


class FixedCache(SlotCache):
    """A cache of one row, and the passes recorded over its buffers; where those are replaced the passes are dropped."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.passes: dict[tuple[int, int, tuple[int, ...]], FixedPass] = {}
        self._recorded: list[Tensor] = []

    @outside_inference_mode
    def prepare(self, like: Tensor, room: int) -> None:
        """Make room for `room` slots in buffers like this [1, heads, 0, D]."""
        for buffer in self.buffers:
            data = buffer.data
            if data is None or data.shape[2] < room:
                buffer.data = like.new_empty((1, like.shape[1], room, like.shape[3]))
                if data is not None:
                    buffer.data[:, :, : buffer.length] = data[:, :, : buffer.length]
        held = [buffer.data for buffer in self.buffers if buffer.data is not None]
        if [*map(id, held)] != [*map(id, self._recorded)]:
            self.passes, self._recorded = {}, held
            for data in held:
                data[:, :, self.length :] = 0  # hidden slots count 0 times what they hold, which must be a number

    def fork(self) -> Self:
        twin = super().fork()
        twin.passes, twin._recorded = {}, []
        return twin


class _Slots(SlotCache):
    """The buffers of a cache as a recorded pass sees them: it writes where `slots` [W] says and reads `reach` slots."""

    def __init__(self, cache: SlotCache, slots: Tensor, reach: int) -> None:
        self.keys, self.values, self.slots, self.reach = cache.keys, cache.values, slots, reach

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._write(self.keys[layer], key), self._write(self.values[layer], value)

    def _write(self, buffer: Buffer, new: Tensor) -> Tensor:
        assert buffer.data is not None
        return buffer.data.index_copy_(2, self.slots, new)[:, :, : self.reach]


class FixedPass(NamedTuple):
    """A recorded pass and the memory that it reads: ids, positions [1, W], slots [W], mask [1, 1, W, reach]."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor
    run: Callable[[], Passed]


class FixedNetwork:
    """A Llama-like network whose passes of few tokens over one row are recorded by `capture`, one for each width, reach
    and choice of hidden states."""

    ragged, reduced_ids, takes_trees = None, None, True

    def __init__(self, network: LlamaNetwork, capture: Capture) -> None:
        self.network, self._capture = network, capture
        self.vocab_size, self.context, self.layers = network.vocab_size, network.context, network.layers
        self.device, self.dtype = network.device, network.dtype

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache; passes are recorded over that of one row."""
        return FixedCache(self.layers) if rows == 1 else self.network.new_cache(rows)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: Hidden = False
    ) -> Passed:
        """Run as :class:`sampling.types.Network` says → logits [B, keep, V], states [B, T, K·H]."""
        count, start, wanted = ids.shape[1], cache.length, states_of(hidden)
        width = next((width for width in WIDTHS if width >= count), 0)
        reach = next((reach for reach in REACHES if reach >= start + width), 0)
        if not isinstance(cache, FixedCache) or len(ids) != 1 or not width or not reach:
            return self.network.forward(ids, positions, mask, cache, keep, hidden)
        cache.prepare(torch.empty(1, *self.network.slot, dtype=self.dtype, device=self.device), reach)
        fixed = cache.passes.get((width, reach, wanted))
        buffers = self._empty(width, reach) if fixed is None else fixed
        buffers.ids[:, :count] = ids
        buffers.positions[:, :count] = positions
        buffers.slots.copy_(torch.arange(start, start + width, device=self.device))
        self._hide(buffers.mask, mask, start, count)
        if fixed is None:
            slots, arguments = _Slots(cache, buffers.slots, reach), (buffers.ids, buffers.positions, buffers.mask)
            run = self._capture(lambda: self.network.forward(*arguments, slots, width, wanted))
            fixed = cache.passes[width, reach, wanted] = buffers._replace(run=run)
        logits, states = fixed.run()
        for buffer in cache.buffers:
            buffer.length = start + count
        return logits[:, count - keep : count].clone(), None if states is None else states[:, :count].clone()

    def _hide(self, kept: Tensor, mask: Tensor | None, start: int, count: int) -> None:
        """Write the mask of the pass into `kept`: `mask` [1, 1, T, S+T] (None: causal) of the tokens, then padding."""
        least = torch.finfo(kept.dtype).min
        if mask is None:
            mask = kept.new_full((count, start + count), least).triu_(start + 1)
        kept.fill_(least)
        kept[..., :count, : start + count] = mask
        kept[..., count:, 0] = 0  # padding must see a slot too

    @outside_inference_mode
    def _empty(self, width: int, reach: int) -> FixedPass:
        ids = torch.zeros(1, width, dtype=torch.long, device=self.device)
        mask = torch.zeros(1, 1, width, reach, dtype=self.dtype, device=self.device)
        return FixedPass(ids, ids.clone(), ids[0].clone(), mask, lambda: (mask, None))
