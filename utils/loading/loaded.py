"""Loading as frozen records: the options, the plan of a model, the model in memory, and a pair. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.catalogue.specs import PairSpec
from utils.objects import HfConfig, HfModel, HfTokenizer

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
UNSAID = ("auto", "none")  # quantizations that add no rounding: the pair's or file's own, or floats


@dataclass(frozen=True)
class LoadOptions:
    """The command line's options for loading; they outrank the catalogue unless they are defaults."""

    device: str = "auto"
    drafter_device: str | None = None
    dtype: str = "auto"
    quantization: str = "none"
    drafter_quantization: str = "none"
    kv_dtype: str = "auto"  # dtype of the cache of a compiled pass (utils/kernels/pass.c)
    activations: str = "q8"  # the activations of a compiled pass: 8 bits, or 16
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False
    graphs: bool = False  # passes are replayed as CUDA graphs
    tp_size: int = 1  # processes that share the target


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How a model is loaded, decided before its weights are read; `check` prints it."""

    name: str
    stored: str = ""  # the format of its weights in files: a dtype, or GGUF
    device: "torch.device"
    dtype: "torch.dtype"  # that it computes in
    quantization: str
    converts: tuple[str, ...] = ()  # changes of the weights, in order
    context: int
    vocab_size: int  # the number of logits, padding included
    encodes: bool = False  # whether an encoder reads the prompt
    expanded: str = ""  # why no compiled pass runs it, and a GGUF file was expanded

    @property
    def dtype_text(self) -> str:
        """The weights' dtype as `--dtype` takes it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def precision(self) -> str:
        """The quantization, else the dtype."""
        return self.dtype_text if self.quantization == "none" else self.quantization


@dataclass(frozen=True, kw_only=True)
class LoadedModel(LoadPlan):
    """A model ready to run, as planned. `bytes` in memory, `parameters` by its shapes, `seconds` to load it;
    `activations`: what enters the products of its quantized weights: "q8", "q16", or "" for floats."""

    model: HfModel  # transformers'; of a GGUF file its parts (utils/loading/packed_gguf.py); or the server that runs it
    parameters: int = 0
    bytes: int = 0
    seconds: float = 0.0
    vocabulary: Any = None  # the `TokenBytes` of a drafter whose tokens are not its target's
    own_head: bool = False  # whether its file has another head than the embedding that its configuration says
    activations: str = ""


def context_of(config: HfConfig) -> int:
    """Return the most tokens of a text; no limit if the configuration names none. Dynamic scaling multiplies it."""
    named = (getattr(config, name, None) for name in CONTEXTS)
    own = next((value for value in named if isinstance(value, int) and value > 0), NO_LIMIT)
    rope = getattr(config, "rope_parameters", None) or {}
    return int(own * rope["factor"]) if rope.get("rope_type") == "dynamic" else own


def limit_text(context: int) -> str:
    """Return a context length in words."""
    return f"{context:,} tokens" if context < NO_LIMIT else "no fixed limit"


@dataclass(frozen=True)
class LoadedPair:
    """A target, its drafter, and what they share. `notes` are lines to show once.

    A draft head (HEAD_KINDS in utils/catalogue/heads.py) is only a folder here: the lane builds it.
    """

    spec: PairSpec
    target: LoadedModel
    drafter: LoadedModel | None
    drafter_word: str  # the word of --drafter (a row of sampling/drafters/registry.py); "model" for a drafter model
    tokenizer: HfTokenizer
    stop_ids: frozenset[int]
    vocab_size: int  # the target's ids that its tokenizer knows
    context: int
    notes: tuple[str, ...] = ()
    draft_head: Path | None = None  # the trained drafter's folder
    cascade_models: Mapping[str, LoadedModel] = field(default_factory=dict)  # by name, large to small

    @property
    def drafts_by(self) -> str:
        """The drafter's word in the lane `spec`."""
        beside = self.spec.beside if self.drafter_word == "model" and self.drafter is not None else None
        return f"{beside}+model" if beside else self.drafter_word

    @property
    def drafting_models(self) -> tuple[LoadedModel, ...]:
        """The loaded models beside the target: the drafter, or those of the cascade."""
        return (*filter(None, [self.drafter]), *self.cascade_models.values())
