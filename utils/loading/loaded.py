"""What loading yields, as frozen records: a model in memory, a pair, and the options it was loaded with.

Knows not how anything is loaded. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.catalogue.specs import PairSpec

if TYPE_CHECKING:
    import torch


NO_LIMIT = 1 << 30  # the context of a model that states none
CONTEXTS = (
    "max_decoder_position_embeddings",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
)
UNSAID = ("auto", "none")  # what asks for no bits of our own: as the pair and its file have them, or all of them


@dataclass(frozen=True)
class LoadOptions:
    """What the command line says about loading; it outranks the catalogue where it is not a default."""

    device: str = "auto"
    drafter_device: str | None = None
    dtype: str = "auto"
    quantization: str = "none"
    drafter_quantization: str = "none"
    kv_dtype: str = "auto"  # of the cache, where a model runs as one compiled pass
    activations: str = "q16"  # what such a pass multiplies weights with: 16 bits, or 8
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False
    tp_size: int = 1  # processes that share the target

    @property
    def for_drafters(self) -> LoadOptions:
        """The same for what drafts: no process shares it, and the revision speaks of the target's repository."""
        return replace(self, revision=None, tp_size=1)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `bytes` are really held, `parameters` as designed, `seconds` to load it."""

    model: Any  # transformers', or of a GGUF file its parts (utils/loading/packed_gguf.py)
    name: str
    parameters: int
    bytes: int
    device: torch.device
    dtype: torch.dtype
    quantization: str
    context: int
    vocab_size: int  # the number of logits, padding included
    seconds: float
    encodes: bool = False  # an encoder reads the prompt, by itself
    vocabulary: Any = None  # of a drafter whose tokens are not its target's: what spells them
    expanded: str = ""  # why no compiled pass runs it, and a GGUF file's bits did not stay as they are

    @property
    def dtype_text(self) -> str:
        """The weights' dtype as `--dtype` takes it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def precision(self) -> str:
        """What rounds its products: the quantization, or else the dtype."""
        return self.dtype_text if self.quantization == "none" else self.quantization


def context_of(config: Any) -> int:
    """The tokens that a text may have; a configuration that names none has no end. Dynamic scaling multiplies them."""
    named = (getattr(config, name, None) for name in CONTEXTS)
    own = next((value for value in named if isinstance(value, int) and value > 0), NO_LIMIT)
    rope = getattr(config, "rope_parameters", None) or {}
    return int(own * rope["factor"]) if rope.get("rope_type") == "dynamic" else own


def limit_text(context: int) -> str:
    """A context in words."""
    return f"{context:,} tokens" if context < NO_LIMIT else "no fixed limit"


@dataclass(frozen=True)
class LoadedPair:
    """A target, what drafts for it, and what they share. `notes` are lines worth showing once.

    Of a trained drafter (see HEAD_KINDS) only the folder is known here: what decodes builds it.
    """

    spec: PairSpec
    target: LoadedModel
    drafter: LoadedModel | None
    drafter_kind: str  # "model", or the word of a drafter that is none
    tokenizer: Any
    stop_ids: frozenset[int]
    vocab_size: int  # of the target, as far as its tokenizer knows them
    context: int
    notes: tuple[str, ...] = ()
    draft_head: Path | None = None  # the trained drafter's folder
    cascade_models: Mapping[str, LoadedModel] = field(default_factory=dict)  # of the cascade, by name, large to small

    @property
    def drafts_by(self) -> str:
        """The word of what drafts in the lane `spec`."""
        beside = self.spec.beside if self.drafter_kind == "model" and self.drafter is not None else None
        return f"{beside}+model" if beside else self.drafter_kind

    @property
    def drafting_models(self) -> tuple[LoadedModel, ...]:
        """The loaded models beside the target: the drafter, or those of the cascade."""
        return (*filter(None, [self.drafter]), *self.cascade_models.values())
