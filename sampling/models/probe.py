"""Whether a transformers model computes the same in pieces as in one pass: tried on a small twin, once a configuration.

Text in pieces with rollbacks must give the logits of a pass without a cache, or the model is refused. Trees and ragged
rows must give them too, or are not used. The twin is a random model with the arithmetic of the large one: its
configuration with a layer of each kind, few heads, narrow widths and short windows. Knows no sampling.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor

from sampling.models.cache import CrossCache, additive, places
from sampling.types import DraftTree, Network, Rows
from utils.errors import UserError, is_count
from utils.loading.loaded import CONTEXTS, context_of
from utils.objects import HfConfig, HfModel, Json

_CLOSE = 1e-3  # of the largest logit: rounding differs by 1e-5, a missing or an extra token by 0.1
_PIECES = (5, 6, 14, 15, 21)  # ends of the passes over a text, some beyond the twin's windows
_ROWS: Rows = [[(7 * at + 5 * at * at + row * 29) % 61 + 20 for at in range(_PIECES[-1])] for row in range(2)]
_WRONG = [33, 28, 41]  # a draft that is rejected
_SOURCES: Rows = [[30, 25, 30, 61, 1], [44, 61, 1]]  # for an encoder
_PARENTS = [-1, 0, 0, -1]
_PATHS = [[], [0], [0, 1], [0, 2], [3]]  # the nodes on the way to the row's end and to each node
_NODES = [[24, 31, 47, 52], [66, 39, 21, 58]]  # the drafts of each row's tree


def takes(model: HfModel, argument: str) -> bool:
    """Whether the model's pass has a parameter of this name."""
    return argument in inspect.signature(model.forward).parameters


@dataclass(frozen=True, slots=True)
class Exact:
    """The kinds of pass that give the right logits, beside a pass over the next tokens of one row."""

    batches: bool = True  # over rows of equal length
    masks: bool = True  # with our masks: trees, ragged rows
    slots: int | None = None  # the most slots of a mask; None: any number
    singly: bool = False  # only if recurrent layers read one token at a time


_known: dict[str, Exact | str] = {}


def probe(model: HfModel, build: Callable[[HfModel, Exact], Network]) -> Exact:
    """Return the kinds of pass in which the network that `build` makes of a small twin of `model` gives the right
    logits. UserError if there is none."""
    reason = ""
    for narrow in (True, False):
        try:
            config = small(model.config, narrow)
            key = f"{type(model)} {model.config._attn_implementation} {windows(model.config)} {config.to_json_string()}"
            if key not in _known:
                _known[key] = _tried(model, twin(model, config), build)
        except Exception as error:  # configurations check themselves in many ways
            reason = reason or f"no small twin of its configuration can be tried ({' '.join(str(error).split())[:160]})"
            continue
        if isinstance(result := _known[key], Exact):
            return result
        reason = result
        break
    raise UserError(f"{type(model).__name__} is not supported: {reason}")


def _tried(model: HfModel, small: HfModel, build: Callable[[HfModel, Exact], Network]) -> Exact | str:
    """Return the kinds of pass that are right for the twin, and so for `model`; or why `model` cannot be used."""
    from sampling.models.recurrent import recurrent_layers

    reason, candidates = "", [Exact(), Exact(batches=False)]
    if recurrent_layers(small.config.get_text_config(decoder=True)):
        candidates = [Exact(batches=False, masks=False, singly=singly) for singly in (False, True)]
    for exact in candidates:
        try:
            right = _in_pieces(small, build(small, exact), _ROWS if exact.batches else _ROWS[:1])
        except Exception as error:
            reason = reason or f"a pass with a cache ends in {type(error).__name__}"
            continue
        if right:
            return _with_limits(model, small, build, exact) if exact.masks else exact
        reason = "in pieces, with a cache that is cut back, it gives other logits than at once"
    return reason


def _with_limits(model: HfModel, small: HfModel, build: Callable[[HfModel, Exact], Network], exact: Exact) -> Exact:
    """Return `exact` with the number of slots up to which masks give the right logits, or without masks."""

    def holds(start: int) -> bool:
        try:
            return exact.batches and _with_masks(small, build(small, exact), start)
        except Exception:
            return False

    if holds(_PIECES[2]):
        return exact
    limits = windows(model.config)
    return replace(exact, slots=min(limits)) if limits and holds(WINDOW - 8) else replace(exact, masks=False)


@torch.inference_mode()
def _uncached(model: HfModel, texts: Rows, sources: list[int]) -> Tensor:
    """[B, T, V] logits of a pass without a cache over each text; `sources`: the numbers of the encoder's prompts."""
    if not model.config.is_encoder_decoder:
        ids = torch.tensor(texts)  # `generate` passes positions to a model that takes them
        own = {"position_ids": torch.arange(ids.shape[1])[None]} if takes(model, "position_ids") else {}
        return cast(Tensor, model(input_ids=ids, use_cache=False, **own).logits)
    pairs = [(torch.tensor([_SOURCES[at]]), torch.tensor([text])) for text, at in zip(texts, sources, strict=True)]
    return torch.cat([model(input_ids=ids, decoder_input_ids=own, use_cache=False).logits for ids, own in pairs])


def _near(logits: Tensor, right: Tensor) -> bool:
    return bool((logits - right).abs().max() < _CLOSE * max(1.0, float(right.abs().max())))


@torch.inference_mode()
def _in_pieces(model: HfModel, network: Network, rows: Rows) -> bool:
    """Return whether passes over pieces, each followed by a rejected draft, give the logits of a single pass. The pass
    counts all tokens of a piece but the first as drafts, so that a recurrent model reads accepted ones again."""
    cache, start, numbers = _cache(network, len(rows)), 0, list(range(len(rows)))
    right = _uncached(model, rows, numbers)
    for end in _PIECES:
        if not _near(_uncached(model, [row[:end] for row in rows], numbers)[:, -1], right[:, end - 1]):
            return False
        ids = torch.tensor([row[start:end] + _WRONG for row in rows])
        positions = torch.arange(start, end + len(_WRONG)).expand(len(rows), -1)
        logits, _ = network.forward(ids, positions, None, cache, ids.shape[1])
        if not _near(logits[:, : end - start], right[:, start:end]):
            return False
        start = cache.resume(end)
        cache.crop(start)
    return True


@torch.inference_mode()
def _with_masks(model: HfModel, network: Network, start: int) -> bool:
    """Whether two rows, fed 1 and 3 tokens from `start` and then 1 each, and trees after them get the right logits."""
    cache, count, lengths = _cache(network, 2), len(_PARENTS), [start, start]
    trees = [DraftTree.of(nodes, _PARENTS) for nodes in _NODES]
    network.forward(torch.tensor(_ROWS)[:, :start], torch.arange(start).expand(2, -1), None, cache, 1)
    for more in ([1, 3], [1, 1]):
        feed = [row[length : length + new] for row, length, new in zip(_ROWS, lengths, more, strict=True)]
        width, before = max(more), max(lengths)
        positions, seen = places(lengths, feed, trees, before, width, count)
        ids = [[0] * (width - len(new)) + new + nodes for new, nodes in zip(feed, _NODES, strict=True)]
        logits, _ = network.forward(torch.tensor(ids), positions, additive(seen, network), cache, count + 1)
        ends = [length + new for length, new in zip(lengths, more, strict=True)]
        texts = [
            row[:end] + [nodes[node] for node in path]
            for row, end, nodes in zip(_ROWS, ends, _NODES, strict=True)
            for path in _PATHS
        ]
        padded = [text + [1] * (max(ends) + 2 - len(text)) for text in texts]
        right = _uncached(model, padded, [number for number in range(2) for _ in _PATHS])
        if not _near(logits.flatten(0, 1), right[range(len(texts)), [len(text) - 1 for text in texts]]):
            return False
        cache.shift([(0, before + width - 1, start)], max(ends))
        lengths = ends
    return True


def _cache(network: Any, rows: int) -> Any:
    cache = network.new_cache(rows)
    if isinstance(cache, CrossCache):
        network.read(cache, _SOURCES[:rows])
    return cache


# -- the small twin --------------------------------------------------------------------------------------

VOCABULARY, WINDOW, FEW = 96, 12, 16
LARGEST = 150_000_000  # parameters of a twin
_LAYERS = re.compile(
    r"((conf|t2u|speech)_)?(num_)?((en|de)coder_|hidden_)?layers(_per_stack)?|n_layers?|num_blocks|depth"
)
_HEADS = re.compile(
    r"(swa_|(num_)?(en|de)coder_)?(num_)?(attention_|key_value_|kv_)?heads|n_heads?|kv_n_heads"
    r"|mamba_(n|num)_heads|n_mamba_heads"
)
_GROUPS = re.compile(r"(mamba_)?n_?groups")  # groups that share heads of a recurrent layer
_WIDTHS = re.compile(
    r"(attention_)?hidden_size|d_model|n_embd|dim_model|emb_dim|embedding_size|word_embed_proj_dim|lru_width|mamba_d_ssm"
)
_INNER = re.compile(r".*intermediate_size(_mlp)?|.*ffn_dim|d_ff|dff|dim_ff|n_inner|.*ffn_hidden_size")
_EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts|zero_expert_num")
_WINDOWS = re.compile(  # names of the lengths of windows
    r"sliding_window(_size)?|window_size|attention_chunk_size|local_attention(_window_len)?|attention_window"
    r"|(keep|local)_window_size|local_radius|floor_scale|log_scaling_n_floor|rel_extent|index_topk|index_block_size"
)
# Numbers of layers, from the first on, that are of another kind. `num_kv_shared_layers` counts from the last one.
_FROM_BELOW = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_NOT_SIZES = ("label2id", "id2label", "quantization_config")


def twin(model: HfModel, config: HfConfig) -> HfModel:
    """A small model of the class of `model` and of a :func:`small` configuration: random float32 weights, on the CPU.

    Raises ValueError where it would be large, and what transformers raises for a configuration that it does not take.
    """
    eager = model.config._attn_implementation == "eager"
    given = {"dtype": torch.float32, "attn_implementation": "eager" if eager else "sdpa"}
    with torch.device("meta"):
        size = sum(weight.numel() for weight in type(model)._from_config(config, **given).parameters())
    if size > LARGEST:
        raise ValueError(f"its small twin would have {size / 1e6:.0f} million parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small_model = type(model)._from_config(config, **given).eval()
        for weight in small_model.parameters():  # so large that every token seen moves every logit
            if weight.dim() > 1:
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    return small_model


def small(config: HfConfig, narrow: bool = True) -> HfConfig:
    """`config` with few layers, a small vocabulary and short windows; if `narrow` also with few heads.

    Raises whatever transformers raises for a configuration that it does not take.
    """
    sizes = _small(config.to_dict(), windows(config), narrow)
    left_out = ("quantization_config", "transformers_version")
    return type(config).from_dict({name: size for name, size in sizes.items() if name not in left_out})


def windows(config: HfConfig) -> list[int]:
    """The lengths of windows in tokens, within its context, in which a model of `config` looks back."""
    text = config.get_text_config(decoder=True)
    sizes = {size for name, size in text.to_dict().items() if _WINDOWS.fullmatch(name) and is_count(size, 1)}
    return [size for size in sizes if size < context_of(text)]


def _small(sizes: Json, short: list[int], narrow: bool) -> Json:
    changed = {**sizes, **(_few_heads(sizes) if narrow else {})}
    for name, size in sizes.items():
        if isinstance(size, dict) and name not in _NOT_SIZES:
            text = re.search("text|decoder|encoder$|attn_config|ffn_config", name) and "audio" not in name
            changed[name] = _small(size, short, narrow and bool(text))
        elif re.search("token_(id|index)$", name):
            changed[name] = _small_ids(size)
        elif narrow and _INNER.fullmatch(name):
            if size is not None or name in ("n_inner", "intermediate_size"):
                changed[name] = [4 * FEW] * len(size) if isinstance(size, list) else 4 * FEW
        elif not is_count(size, 1):
            continue
        elif re.fullmatch("(src_|tgt_|decoder_)?vocab_size(_per_layer_input)?|n_words", name):
            changed[name] = VOCABULARY
        elif name in (*CONTEXTS, "original_max_position_embeddings"):
            changed[name] = max(size, 4 * FEW)
        elif _EXPERTS.fullmatch(name):
            changed[name] = min(size, FEW)
        elif name == "index_topk_blocks":
            changed[name] = 1
        elif _WINDOWS.fullmatch(name) and size in short:
            changed[name] = WINDOW
    return changed | _few_layers(changed)


def _small_ids(ids: Any) -> Any:
    if isinstance(ids, list):
        return [_small_ids(token) for token in ids]
    return min(ids, VOCABULARY - 1) if isinstance(ids, int) else ids


def _few_heads(sizes: Json) -> Json:
    """Heads and widths divided by the same number, so that the size of a head stays."""
    heads = {name: size for name, size in sizes.items() if _HEADS.fullmatch(name) and is_count(size, 2)}
    if not heads:
        return {}
    common, most = gcd(*heads.values()), max(heads.values())
    several = (number for number in range(2, most // 4 + 1) if common % number == 0)
    by = max(several, default=common if most > FEW else 1)
    counts = {name: size for name, size in sizes.items() if _WIDTHS.fullmatch(name) and is_count(size, 1)}
    fewer = {name: size // by for name, size in (heads | counts).items() if size % by == 0}
    share = gcd(*(fewer[name] for name in heads if "mamba" in name or name == "num_heads"))
    return fewer | {
        name: gcd(size, share) for name, size in sizes.items() if _GROUPS.fullmatch(name) and is_count(size, 1)
    }


def _few_layers(sizes: Json) -> Json:
    """A layer of each kind, at least two; keys about single layers are reduced to these."""
    counts = {name: size for name, size in sizes.items() if _LAYERS.fullmatch(name) and is_count(size, 1)}
    if kinds := sizes.get("attention_types"):  # GPT-Neo's
        return {"attention_types": [[kinds[0][0], 1]], "attention_layers": kinds[0][0], "num_layers": len(kinds[0][0])}
    if not counts:
        return {}
    total = max(counts.values())
    if pattern := sizes.get("block_types"):  # RecurrentGemma's, repeated
        return dict.fromkeys(counts, len(pattern))
    if sizes.get("attn_layer_period"):  # Jamba's
        return {**dict.fromkeys(counts, 2), "attn_layer_period": 2, "attn_layer_offset": 1}
    lists = {name: each for name, each in sizes.items() if isinstance(each, list)}
    indices = {
        name: each
        for name, each in lists.items()
        if re.search("(layers|idxs|layer_ids)$", name)
        and all(isinstance(layer, int) for layer in each)
        and all(a < b for a, b in pairwise([-1, *each]))
    }
    listed = {name: each for name, each in lists.items() if name not in indices and len(each) == total > 2}
    single = {int(layer): change for layer, change in (sizes.get("per_layer_config") or {}).items()}
    beyond = {  # by the name of such a number, whether each layer is one of those that it counts
        name: [layer < sizes[name] if name in _FROM_BELOW else layer >= total - sizes[name] for layer in range(total)]
        for name in (*_FROM_BELOW, "num_kv_shared_layers")
        if sizes.get(name)
    }
    layers: dict[str, int] = {}
    for layer in range(total):
        kinds = [each[layer] for each in (*listed.values(), *beyond.values())]
        layers.setdefault(repr([kinds, [layer in each for each in indices.values()], single.get(layer)]), layer)
    kept = sorted(layers.values()) if len(layers) > 1 else list(range(min(total, 2)))
    changed: Json = {name: min(size, len(kept)) for name, size in counts.items()}
    changed |= {name: [each[layer] for layer in kept] for name, each in listed.items()}
    changed |= {name: [kept.index(layer) for layer in each if layer in kept] for name, each in indices.items()}
    changed |= {name: sum(each[layer] for layer in kept) for name, each in beyond.items()}
    own = {str(kept.index(layer)): single[layer] for layer in kept if layer in single}
    return changed | ({"per_layer_config": own} if single else {})
