"""Multi-token prediction layers, which ship with their target (DeepSeek-V3, arXiv 2412.19437, section 2.2).

One layer of the target's own kind reads each token beside the target's state one position before: join[norm(embedding);
norm(state)] → layer → norm → the target's head. So it drafts as an EAGLE head does (eagle.py): until the target's state
is known its own state replaces it. Both are taken after the final norm, as in transformers' `MtpModel` and in
*speculators*' `mtp`. Two namings are read: Qwen's (`mtp.…`) and DeepSeek's and GLM's (the layer after the last). Of
several layers the first drafts every token. Embedding and head are the target's, though a file may repeat them.
"""

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sampling.drafters.draft_heads.eagle import FeatureLM, FeatureSession
from sampling.drafters.draft_model import of_lm
from sampling.drafters.registry import DraftRequest, Parts
from sampling.models.cache import SlotCache, additive, as_transformers_cache
from sampling.models.causal import CausalLM
from sampling.models.network import TransformersNetwork
from sampling.types import Drafter, Network
from utils.errors import UserError
from utils.files import read_object
from utils.kernels.quantized_linear import pack, quantize
from utils.loading.completeness import check_tensors
from utils.objects import HfModel, Json

_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # a tensor of all → those of each


class MtpLayer(nn.Module):
    """The first multi-token prediction layer of `model`, a transformers causal model, without memory for its weights.

    `sparse`: its feed-forward part is a mixture.
    """

    def __init__(self, model: HfModel, sparse: bool) -> None:
        super().__init__()
        trunk = model.get_decoder()
        config, norm = copy.deepcopy(trunk.config), type(trunk.norm)
        alone = {
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            "mlp_layer_types": ["sparse" if sparse else "dense"],
            "first_k_dense_replace": int(not sparse),
            "mlp_only_layers": [] if sparse else [0],
            "decoder_sparse_step": 1,
        }
        for name, value in alone.items():
            if hasattr(config, name):
                setattr(config, name, value)
        if config._attn_implementation not in ("sdpa", "eager"):
            config._attn_implementation = "sdpa"
        size = config.hidden_size
        with torch.device("meta"):
            self.token_norm, self.state_norm, self.norm = (norm(size, eps=config.rms_norm_eps) for _ in range(3))
            self.join = nn.Linear(2 * size, size, bias=False)
            self.block = type(trunk.layers[-1])(config, 0)


class Naming(NamedTuple):
    """A file's names for the tensors of a layer: all begin with `prefix`, those of the decoder layer go on with
    `block`. `parts`: the file's names of the other tensors → ours."""

    prefix: str
    parts: Mapping[str, str]
    block: str

    def ours(self, stored: str) -> str | None:
        """Return our name of a tensor; None for one that is no part of the layer, or shared with the target."""
        if not stored.startswith(self.prefix) or (name := stored.removeprefix(self.prefix)) in _SHARED:
            return None
        part, _, rest = name.rpartition(".")
        if part in self.parts:
            return f"{self.parts[part]}.{rest}"
        return f"block.{name.removeprefix(self.block)}" if name.startswith(self.block) else None

    def stored(self, ours: str) -> str:
        """The file's name of a tensor."""
        part, _, rest = ours.partition(".")
        outside = next((f"{theirs}." for theirs, own in self.parts.items() if own == part), self.block)
        return f"{self.prefix}{outside}{rest}"


def naming(names: Collection[str], layers: int) -> Naming | None:
    """Return the naming of the multi-token prediction layer among `names`; None if there is none. `layers`: the
    target's number of layers."""
    qwen = Naming(
        "mtp.",
        {"fc": "join", "pre_fc_norm_embedding": "token_norm", "pre_fc_norm_hidden": "state_norm", "norm": "norm"},
        "layers.0.",
    )
    deepseek = Naming(
        f"model.layers.{layers}.",
        {"eh_proj": "join", "enorm": "token_norm", "hnorm": "state_norm", "shared_head.norm": "norm"},
        "",
    )
    wanted = "join.weight", "state_norm.weight"
    return next((each for each in (qwen, deepseek) if {*map(each.stored, wanted)} & {*names}), None)


def load_layer(model: HfModel, folder: Path, device: torch.device, dtype: torch.dtype) -> MtpLayer:
    """The multi-token prediction layer that lies in `folder` beside the weights of `model`.

    UserError if there is none, or in one line for tensors that are missing, too many or of another shape.
    """
    stored: Json = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118  # no mapping
    if (names := naming(stored, model.get_decoder().config.num_hidden_layers)) is None:
        raise UserError(f"{folder.name} ships no multi-token prediction layer (mtp.… or a layer after the last)")
    tensors: dict[str, Tensor] = {ours: part[:] for key, part in stored.items() if (ours := names.ours(key))}
    layer = MtpLayer(model, any(".experts." in name for name in tensors))
    wanted = layer.state_dict()
    lacking = _fuse_experts(tensors, wanted)
    lacking += [name for name in wanted if name not in tensors and not _of_experts(name)]
    check_tensors(
        f"the multi-token prediction layer of {folder.name}",
        [names.stored(name) for name in lacking],
        [names.stored(name) for name in tensors if name not in wanted],
        [
            (names.stored(name), value.shape, wanted[name].shape)
            for name, value in tensors.items()
            if name in wanted and value.shape != wanted[name].shape
        ],
    )
    parameters = dict(layer.named_parameters())
    layer.load_state_dict(
        {name: value.to(device, dtype if name in parameters else None) for name, value in tensors.items()}, assign=True
    )
    if device.type == "cpu" and dtype == torch.float32:
        if read_object(folder / "config.json").get("rounded"):  # a file of fewer bits
            quantize(layer, "q8", tables=False)
        pack(layer)
    return layer.eval().requires_grad_(False)


def _of_experts(name: str) -> bool:
    return name.rpartition(".")[0].endswith(".experts")


def _fuse_experts(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Join the tensors of single experts as the layer has them; return the names of those that are missing."""
    lacking: list[str] = []
    for name in filter(_of_experts, wanted.keys() - tensors.keys()):
        base, _, part = name.rpartition(".")
        each = [
            [f"{base}.{expert}.{linear}.weight" for linear in _EXPERTS[part]] for expert in range(len(wanted[name]))
        ]
        lacking += (missing := [single for names in each for single in names if single not in tensors])
        if not missing:
            tensors[name] = torch.stack([torch.cat([tensors.pop(single) for single in names]) for names in each])
    return lacking


class MtpNetwork:
    """The pass of a multi-token prediction layer, as :class:`FeatureSession` calls it.

    Shapes: B rows, T new tokens, S slots, H the target's width. Slot 0 is the first token's, which has no state before
    it: no other token sees that slot.
    """

    compiled = reduced_ids = ragged = None
    layers = 1

    def __init__(self, layer: MtpLayer, target: TransformersNetwork) -> None:
        model, self.layer = target.model, layer
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._rotary = model.get_decoder().rotary_emb
        self.vocab_size, self.context, self.takes_trees = target.vocab_size, target.context, True
        self.device, self.dtype = target.device, target.dtype

    def new_cache(self, rows: int) -> SlotCache:
        """An empty cache."""
        return SlotCache(1)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] long → [B, T, H]."""
        return cast(Tensor, self._embed(ids)).to(self.device)

    def join_target(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Join tokens and the states one position before, [B, T, H] both → the layer's input [B, T, H]."""
        both = self.layer.token_norm(embedded), self.layer.state_norm(states.to(embedded))
        return cast(Tensor, self.layer.join(torch.cat(both, dim=-1)))

    join_own = join_target

    def join_none(self, embedded: Tensor) -> Tensor:
        """Return [B, T, H] for first tokens, to which no later token attends."""
        return self.join_target(embedded, torch.zeros_like(embedded))

    @torch.no_grad()
    def run(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: SlotCache) -> Tensor:
        """x [B, T, H] at positions [B, T] → own normed states [B, T, H]; mask as in :class:`sampling.types.Network`."""
        out = self.layer.block(
            x,
            attention_mask=additive(_seen(positions.cpu(), mask, cache.length), cast(Any, self)),
            position_ids=positions,
            position_embeddings=self._rotary(x, positions),
            past_key_values=as_transformers_cache(cache),
            use_cache=True,
        )
        return cast(Tensor, self.layer.norm(out[0] if isinstance(out, tuple) else out))

    def answer(self, own: Tensor, keep: int, hidden: bool = False) -> tuple[Tensor, Tensor | None]:
        """Own states [B, T, H] → logits [B, keep, V] of the last `keep`, and the states if `hidden`."""
        return cast(Tensor, self._head(own[:, own.shape[1] - keep :])), own if hidden else None


def _seen(positions: Tensor, mask: Tensor | None, cached: int) -> Tensor:
    """Return [B, T, S+T] bool: the slots that tokens at positions [B, T] see. A first token's slot is seen by itself
    alone."""
    rows, new = positions.shape
    seen = (
        torch.ones(rows, new, cached + new, dtype=torch.bool).tril(cached)
        if mask is None
        else (mask[:, 0] == 0).cpu().expand(rows, -1, -1).clone()
    )
    seen[..., : min(cached, 1)] = False
    seen[..., cached:] &= (positions != 0)[:, None] | torch.eye(new, dtype=torch.bool)
    return seen


class MtpLM(FeatureLM):
    """The multi-token prediction layer of `target`, beside its weights or in another `folder`. UserError if it has none
    that can be read."""

    following = FeatureSession

    def __init__(self, target: CausalLM, folder: Path | None = None) -> None:
        network = target.network
        if not isinstance(network, TransformersNetwork):
            raise UserError("drafter mtp: no multi-token prediction layer ships with a target of this kind")
        if (getattr(network.model, "tp_size", None) or 1) > 1:
            raise UserError("drafter mtp reads all states of its target: it goes with one process")
        folder = folder or Path(network.model.config.name_or_path)
        try:
            own = MtpNetwork(load_layer(network.model, folder, network.device, network.dtype), network)
            token = torch.zeros(1, 2, dtype=torch.long, device=own.device)
            own.run(own.join_none(own.embed(token)), torch.arange(2)[None].to(own.device), None, own.new_cache(1))
        except UserError:
            raise
        except Exception as error:  # layers of other families want other arguments
            why = " ".join(str(error).split())[:160]
            raise UserError(f"the multi-token prediction layer of {folder.name} cannot be read: {why}") from error
        CausalLM.__init__(self, cast(Network, own), "mtp", target.vocab_size)


def build(pair: Parts, request: DraftRequest) -> Drafter:
    """Build a drafter on the multi-token prediction layer of the pair's target."""
    return of_lm(pair.shipped("mtp", MtpLM), request)
