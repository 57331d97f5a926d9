"""Random targets and students for tests: any small vocabulary, weights lively enough that every part matters.

Nothing is trained: a student agrees with its target by chance, often enough in a vocabulary of 4 or 8.
`PrefixLM` is the target as the proofs want it, a function of the prefix without any cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from sampling.drafters.draft_heads.checkpoint import target_rotary
from sampling.drafters.draft_heads.config import BlockConfig, DraftHeadConfig
from sampling.drafters.draft_heads.dflash import BlockLM
from sampling.drafters.draft_heads.eagle import FeatureDrafter, FeatureLM
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_model import ModelDrafter
from sampling.models.causal import CausalLM, CausalSession
from sampling.types import Budget, Draft, Hidden, Rows, Sampler

KINDS = ("plain", "glide", "feature", "eagle")
BLOCKS: dict[str, dict[str, Any]] = {  # kinds that draft a block at once, and what their configuration says
    "peagle": {"mask": 2, "drafts": 3, "wide": True, "qk_norm": False},
    "dflash": {"mask": 2, "drafts": 3, "windows": (0, 2), "num_hidden_layers": 2},
    "jetspec": {"mask": 2, "drafts": 3, "windows": (0, 2), "num_hidden_layers": 2, "causal_head": True},
    "domino": {
        **{"mask": 2, "drafts": 3, "windows": (0,), "from_anchor": True},
        **{"memory": 4, "bottleneck": 4, "uncorrected": 1},
    },
    "dflare": {"mask": 2, "drafts": 3, "windows": (0, 2), "num_hidden_layers": 2, "hidden_size": 24},
    "dspark": {"mask": 2, "drafts": 3, "windows": (0,), "rank": 4, "markov": "rnn", "confidence": True},
    "dflash2": {"mask": 2, "drafts": 3, "windows": (0,), "rank": 4, "choices": 3, "taps": 2, "group": 8},
}
STATES = (-1, 0, 1, 2)  # of a target, that its drafters here read
LIVELY = 1.5  # spread of random weights: every part of the model matters then


def enliven(module: nn.Module, seed: int) -> None:
    """Gaussian weights, a matrix's scaled to its width; norms around 1. The global generator is left alone."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=noise)
            scaled = 1 + 0.3 * drawn if parameter.dim() == 1 else LIVELY * drawn / parameter.shape[-1] ** 0.5
            parameter.copy_(scaled)


def make_target(
    vocab: int = 40, seed: int = 0, dtype: torch.dtype = torch.float32, family: str = "Llama", **changes: Any
) -> Any:
    """A random Llama or Qwen3 model on the CPU; `changes` are those of its configuration."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    with torch.random.fork_rng(devices=[]):
        config = getattr(transformers, f"{family}Config")(**(sizes | changes))
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    enliven(model, seed)
    return model.eval().to(dtype).requires_grad_(False)


def make_student(
    kind: str,
    target: Any,
    short: Sequence[int] | None = None,
    seed: int = 5,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> DraftHead:
    """A random draft head for `target`; `short` are the ids of its output layer."""
    large = target.config
    sizes: dict[str, Any] = {
        "kind": kind,
        "vocab_size": large.vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "large_hidden_size": large.hidden_size,
        "large_num_attention_heads": large.num_attention_heads,
        "large_head_dim": large.head_dim,
        "max_position_embeddings": 256,
        "short_list": len(short or ()),
    }
    if kind == "eagle":
        sizes |= {"reads": (0, 1, 2), "wide": True}
    if kind in BLOCKS:
        sizes |= {"reads": (0, 1, 2), "qk_norm": True, **BLOCKS[kind]}
    ids = None if short is None else torch.tensor(short)
    with torch.random.fork_rng(devices=[]):
        student = DraftHead((BlockConfig if kind in BLOCKS else DraftHeadConfig)(**(sizes | changes)), ids)
    enliven(student, seed)
    student.adopt(ids, target_rotary(target))
    return student.to(dtype).eval().requires_grad_(False)


def make_drafter(student: DraftHead, target_layers: int = 3) -> ModelDrafter:
    """The drafter of a draft head, whatever its kind."""
    if student.config.kind == "glide":
        return ModelDrafter(GlideLM(student, target_layers))
    if student.config.kind in FeatureLM.parts:
        return FeatureDrafter(student, student.config.kind)
    if student.config.kind in BLOCKS:
        return ModelDrafter(BlockLM(student))
    return ModelDrafter(CausalLM(StudentNetwork(student), "plain"))


class PrefixLM:
    """A target's logits by prefix, computed anew each time: what `tests.support.reference` asks of a model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """[len(contexts), V]."""
        return torch.stack([self._one(tuple(context)) for context in contexts])

    def _one(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self._known:
            session = CausalLM(self.model).open([list(prefix)])
            self._known[prefix] = session.score([list(prefix)], Draft.empty(1))[0, 0].clone()
        return self._known[prefix]


def text(seed: int, count: int, vocab: int = 40) -> list[int]:
    """Random ids."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fed(target: Any, rows: Rows, held: list[int], hidden: Hidden = False) -> CausalSession:
    """A target's session that holds the first `held[b]` tokens of each row (of one row none is possible)."""
    session = CausalLM(target).open(rows, hidden=hidden)
    if any(held):
        session.score([row[: max(count, 1)] for row, count in zip(rows, held, strict=True)], Draft.empty(len(rows)))
    return session


@torch.no_grad()
def spread_logits(student: DraftHead, states: Tensor) -> Tensor:
    """What the head makes of states [..., H]: [..., V], -inf outside the short list. Written naively."""
    short = states @ student.lm_head.weight.T
    ids = student.reduced_ids
    if not len(ids):
        return short
    wide = torch.full((*short.shape[:-1], student.config.vocab_size), float("-inf"), dtype=short.dtype)
    for place, token in enumerate(ids.tolist()):
        wide[..., token] = short[..., place]
    return wide


def close(got: Tensor, wanted: Tensor, within: float = 2e-5) -> None:
    """The same ids possible, and the same logits up to rounding."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert torch.equal(got.isinf(), wanted.isinf())
    left, right = (part.masked_fill(part.isinf(), 0.0).double() for part in (got, wanted))
    worst = float((left - right).abs().max() / right.abs().max())
    assert worst < within, f"off by {worst:.1e} of the largest value"


def watched(drafter: Any, whole: Callable[[list[int]], Tensor]) -> list[list[int]]:
    """How many tokens each pass of each round feeds; its first logits are compared with those after the whole row."""
    widths: list[int] = []
    rounds: list[list[int]] = []
    run, propose = drafter.lm.network.run, drafter.propose

    def counting(x: Tensor, *rest: Any) -> Tensor:
        widths.append(x.shape[1])
        return run(x, *rest)

    def proposing(rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        close(drafter.sessions[0].fork().score(rows, Draft.empty(1))[0, 0], whole(rows[0]))
        widths.clear()
        draft = propose(rows, budget, sampler)
        rounds.append(list(widths))
        return draft

    drafter.lm.network.run, drafter.propose = counting, proposing
    return rounds
