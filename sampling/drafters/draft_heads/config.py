"""The shape of a draft head, and the facts of its target that it depends on. Knows no modules, no torch."""

from dataclasses import dataclass, field

from utils.catalogue.heads import HEAD_KINDS
from utils.errors import UserError, raise_first
from utils.objects import Json


@dataclass(frozen=True)
class DraftHeadConfig:
    """The shape of a draft head, and facts of its target (`large_…`)."""

    kind: str  # one of HEAD_KINDS
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    large_hidden_size: int = 0
    large_num_attention_heads: int = 0
    large_head_dim: int = 0
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    block_size: int = 5  # glide: the longest lag in training: tokens before a draft that the target has not read yet
    short_list: int = 0  # ids of the head; 0 = all of them
    recency: bool = False  # glide: its cross-attention scores fall with distance, by a learned slope a head
    shared_embedding: bool = False  # the embedding is the target's and not stored
    shared_head: bool = False  # the head's rows are the target's and not stored
    window: int = 0  # positions that it looks back while drafting, as in training; 0 = to the beginning
    # The target's states that it reads, concatenated (`sampling.types.Hidden`); feature: () is the last state alone.
    reads: tuple[int, ...] = ()
    wide: bool = False  # eagle: the first layer reads token and state side by side (EAGLE-3), else `fc` joins them
    fc_bias: bool = False
    attention_bias: bool = False  # of q, k, v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    qk_norm: bool = False  # of each head, as Qwen3 has them
    final_norm: bool = True
    norm_before_fc: bool = False  # of the target's states, all as one
    fc_norm: bool = False  # … each by itself
    norm_before_residual: bool = False  # the first layer's residual is the normed state
    norm_output: bool = False  # the normed state stands in for the target's
    rope: Json = field(default_factory=dict)  # rotary parameters beyond the base, as transformers has them

    def __post_init__(self) -> None:
        raise_first(
            {
                f"a draft head is {', '.join(HEAD_KINDS)}, got '{self.kind}'": self.kind not in HEAD_KINDS,
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} of keys": (
                    self.num_attention_heads % self.num_key_value_heads
                ),
            },
            UserError,
        )
        needed = {
            "plain": [],
            "glide": ["large_num_attention_heads", "large_head_dim"],
            "feature": ["large_hidden_size"],
        }
        missing = [name for name in needed.get(self.kind, ["large_hidden_size", "reads"]) if not getattr(self, name)]
        if missing:
            raise UserError(f"a {self.kind} head needs {' and '.join(missing)} of its target")
        object.__setattr__(self, "reads", tuple(self.reads))  # a file has lists

    @property
    def is_eagle(self) -> bool:
        """Return whether each token enters with the state one position before it, in the format of EAGLE's authors."""
        return self.kind in ("eagle", "peagle")


@dataclass(frozen=True)
class BlockConfig(DraftHeadConfig):
    """The shape of a head that drafts `drafts` tokens in one pass over the last token's row and rows of a mask token.

    `mask`: the id of the mask token, whose embedding enters those rows. `from_anchor`: the last token's own row gives
    the first draft, else the first mask's. `windows`: positions before the last token that each layer sees; 0 = all.
    `causal`: inside the block, layers with a window see no later row; `causal_head`: nor do the others.
    `rank`: of `markov` (vanilla, gated or rnn; "" for none) or of the candidate selector. `choices`: candidates of a
    position that the selector scores again. `confidence`: the head estimates whether a draft is accepted, with
    `confidence_with_markov` also from the token before it.
    `memory`, `bottleneck`: widths of the GRU and the map by which Domino corrects logits after `uncorrected` drafts.
    `taps`, `group`: rows of a convolution, and channels that share a coefficient.
    """

    mask: int = 0
    drafts: int = 7
    from_anchor: bool = False
    windows: tuple[int, ...] = ()
    causal: bool = True
    causal_head: bool = False
    markov: str = ""
    rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    choices: int = 0
    taps: int = 0
    group: int = 0
    memory: int = 0
    bottleneck: int = 0
    uncorrected: int = 0

    @property
    def mask_tokens(self) -> int:
        """Return the number of mask tokens after the last token's row."""
        return self.drafts - self.from_anchor
