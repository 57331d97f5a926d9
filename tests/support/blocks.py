"""Random block heads as they are published, configuration and tensors in each naming, and their logits by the package
*speculators*, or for kinds that it lacks by naive_blocks.py.

Where that cannot be imported (requirements-dev.txt says why) the numbers are those of block_logits.json, which
`python -m tests.support.blocks` writes.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from sampling.drafters.draft_heads.checkpoint import load_student
from sampling.drafters.draft_heads.dflash import BlockLM
from tests.support import speculators
from tests.support.naive_blocks import block
from tests.support.students import make_target, text
from utils.catalogue.catalogue import head_kind

V, G, HEAD, LAYERS = 40, 24, 8, 8
SHORT = [0, 2, 3, 5, 8, 13, 21, 34, 39]
ENTERS = [2, 4, 7]  # what enters these layers is read


DOMINO = {"projector_type": "domino", "gru_hidden_dim": 6, "emb_dim": 5}


class BlockCase(NamedTuple):
    """A published block head. `style`: speculators, z-lab or DeepSpec."""

    kind: str
    style: str = "speculators"
    options: dict[str, Any] = {}  # noqa: RUF012  # read only
    short: bool = False
    own: bool = False  # an embedding and an output layer
    sliding: tuple[bool, ...] = (False, False)
    block: int = 4

    @property
    def anchored(self) -> bool:
        """Whether the last token's own row gives the first draft."""
        usual = self.style == "DeepSpec" or self.kind in ("dspark", "peagle")
        return bool(self.options.get("sample_from_anchor", self.options.get("shift_label", usual)))


CASES = {
    "DFlash": BlockCase("dflash"),
    "DFlash, windows, a reduced vocabulary": BlockCase("dflash", short=True, sliding=(True, False)),
    "DFlash from the anchor, windows alone": BlockCase(
        "dflash",
        options={"sample_from_anchor": True, "sliding_window_non_causal": True},
        sliding=(True, True),
    ),
    "DFlash of z-lab": BlockCase("dflash", "z-lab"),
    "DFlash of DeepSpec": BlockCase("dflash", "DeepSpec", own=True),
    "DSpark, a reduced vocabulary": BlockCase("dspark", options={"markov_rank": 6}, short=True),
    "DSpark of DeepSpec, gated": BlockCase(
        "dspark",
        "DeepSpec",
        {"markov_rank": 6, "markov_head_type": "gated", "confidence_head_with_markov": False},
        own=True,
    ),
    "DSpark, recurrent, not from the anchor": BlockCase(
        "dspark", options={"markov_rank": 6, "markov_head_type": "rnn", "sample_from_anchor": False}
    ),
    "DFlash2": BlockCase(
        "dflash2", options={"selector_rank": 6, "selector_top_k": 16, "conv_group_size": 8}, sliding=(True, False)
    ),
    "P-EAGLE": BlockCase("peagle", short=True, own=True, sliding=(False,)),
    "P-EAGLE, normed, two layers": BlockCase(
        "peagle", options={"norm_before_fc": True, "norm_before_residual": True}, own=True
    ),
    "JetSpec": BlockCase("jetspec", "z-lab", {"causal_head": True}),
    "DFlare": BlockCase("dflare", "z-lab"),
    "Domino": BlockCase("domino", "z-lab", DOMINO),
    "Domino, its first draft uncorrected": BlockCase(
        "domino", "z-lab", {**DOMINO, "shift_label": True, "pure_draft_prefix_len": 1}
    ),
}


def published(
    case: BlockCase, vocab: int = V, width: int = G, enters: Sequence[int] = ENTERS, layers: int = LAYERS
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors, for a target of this vocabulary, width and depth."""
    noise = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=noise)
        return 1 + 0.3 * made if len(shape) == 1 else 1.5 * made / shape[-1] ** 0.5

    eagle, states = case.kind == "peagle", len(enters) * width
    first = "layers.0.hidden_norm.weight" if eagle else "hidden_norm.weight"
    tensors = {"fc.weight": drawn(width, states), first: drawn(width), "norm.weight": drawn(width)}
    if eagle:
        tensors["mask_hidden"] = drawn(1, 1, states)
    if case.options.get("norm_before_fc"):
        tensors["input_norm.weight"] = drawn(states)
    for at in range(len(case.sliding)):
        layer = f"layers.{at}."
        for name, rows in (("q", 4), ("k", 2), ("v", 2)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = drawn(
                rows * HEAD, 2 * width if eagle and not at else width
            )
            if name in "kv" and case.kind == "dflare":
                tensors[f"{layer}self_attn.{name}_proj_target.weight"] = drawn(2 * HEAD, width)
        tensors[f"{layer}self_attn.o_proj.weight"] = drawn(width, 4 * HEAD)
        if not eagle:
            tensors |= {f"{layer}self_attn.{name}_norm.weight": drawn(HEAD) for name in "qk"}
        if case.kind == "dflash2":
            for name in ("attention", "mlp"):
                tensors[f"{layer}{name}_conv.base_kernel"] = drawn(2, 2, width)
                tensors[f"{layer}{name}_conv.kernel_projection.weight"] = drawn(4 * (width // 8), width)
        tensors |= {f"{layer}mlp.{name}_proj.weight": drawn(32, width) for name in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = drawn(width, 32)
        tensors |= {f"{layer}{name}_layernorm.weight": drawn(width) for name in ("input", "post_attention")}
    if case.kind == "dflare":
        tensors["layer_fusion_weights"] = drawn(len(case.sliding), len(enters))
        del tensors["fc.weight"]
    rows = len(SHORT) if case.short else vocab
    tensors |= _further(case, drawn, rows, vocab, width)
    if case.own:
        tensors["embed_tokens.weight"] = drawn(vocab, width)
    if case.own or case.short:
        tensors["lm_head.weight"] = drawn(rows, width)
    if case.short:
        tensors["d2t"] = torch.tensor(SHORT) - torch.arange(len(SHORT))
        tensors["t2d"] = torch.tensor([token in SHORT for token in range(vocab)])
    inner = {
        "model_type": "llama" if eagle else "qwen3", "vocab_size": vocab, "hidden_size": width, "intermediate_size": 32,
        "num_attention_heads": 4, "head_dim": HEAD, "num_key_value_heads": 2, "num_hidden_layers": len(case.sliding),
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in case.sliding],
        "use_sliding_window": any(case.sliding), "sliding_window": 5 if any(case.sliding) else None,
    }  # fmt: skip
    if eagle:
        inner = {**inner, "mlp_bias": False, "attention_bias": False, "layer_types": None}
    told = {"block_size": case.block, "mask_token_id": 38, **case.options}
    outputs = [layer - 1 for layer in enters]
    if case.style == "z-lab":
        nested = {"target_layer_ids": outputs, "mask_token_id": told.pop("mask_token_id"), **case.options}
        said = {"block_size": case.block, "dflash_config": nested}
        name = "DFlareQwen3Model" if case.kind == "dflare" else "DFlashDraftModel"
        return {"architectures": [name], **inner, **said}, tensors
    if case.style == "DeepSpec":
        own = {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": outputs, "num_target_layers": layers}
        own |= {"markov_rank": 0, "enable_confidence_head": case.kind == "dspark"}
        return {**own, **inner, **told}, tensors
    said = {"speculators_model_type": case.kind, "draft_vocab_size": rows}
    said["eagle_aux_hidden_state_layer_ids" if eagle else "aux_hidden_state_layer_ids"] = [*enters]
    if eagle:
        del told["block_size"]
    made = {"algorithm": case.kind, "verifier": {"name_or_path": "org/Large-8B", "architectures": []}}
    proposal = {"proposal_type": "greedy", "speculative_tokens": case.block if eagle else case.block - 1}
    made |= {"default_proposal_method": "greedy", "proposal_methods": [proposal]}
    return {**said, "speculators_config": made, "transformer_layer_config": inner, **told}, tensors


def _further(case: BlockCase, drawn: Any, rows: int, vocab: int, width: int) -> dict[str, Tensor]:
    """The tensors that a kind has beyond DFlash's."""
    told, tensors = case.options, dict[str, Tensor]()
    if case.kind == "dspark":
        rank, markov = told["markov_rank"], told.get("markov_head_type")
        tensors = {
            "markov_head.markov_w1.weight": drawn(vocab, rank),
            "markov_head.markov_w2.weight": drawn(rows, rank),
        }
        sizes = {"gated": ("gate", rank, width + rank), "rnn": ("joint", 3 * rank, width + 2 * rank)}
        if markov in sizes:
            name, out, entering = sizes[markov]
            tensors |= {
                f"markov_head.{name}_proj.weight": drawn(out, entering),
                f"markov_head.{name}_proj.bias": drawn(out),
            }
        entering = width + rank * told.get("confidence_head_with_markov", True)
        tensors |= {"confidence_head.proj.weight": drawn(1, entering), "confidence_head.proj.bias": drawn(1)}
    if case.kind == "domino":
        memory, narrow = told["gru_hidden_dim"], told["emb_dim"]
        tensors = {
            f"prefix_gru.weight_{name}_l0": drawn(3 * memory, size) for name, size in (("ih", width), ("hh", memory))
        }
        tensors |= {"embed_proj.0.weight": drawn(narrow, width + memory), "embed_proj.2.weight": drawn(vocab, narrow)}
    if case.kind == "dflash2":
        rank = told["selector_rank"]
        tensors = {f"candidate_selector.{name}_codebook": drawn(vocab, rank) for name in ("predecessor", "successor")}
        tensors["candidate_selector.hidden_projection.weight"] = drawn(rank, width)
    return tensors


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """The folder of these."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


NAIVE = ("jetspec", "domino", "dflare")  # kinds that *speculators* 0.9.0 lacks: their reference is naive_blocks.py
AFTER = [5, 17, 3]  # the drafts of a block that a Markov head reads
NUMBERS = Path(__file__).with_name("block_logits.json")


@cache
def target_of(family: str) -> Any:
    """A target of eight layers."""
    return make_target(V, seed=11, family=family, num_hidden_layers=LAYERS)


def loaded(folder: Path, name: str, target: Any) -> Any:
    """The head of a case as an LM, from its folder."""
    case = CASES[name]
    place = written(folder, *published(case))
    assert head_kind(place) == case.kind
    return BlockLM(load_student(place, target))


def naive(name: str, family: str, length: int) -> Tensor:
    """Logits [drafts, V] of the block after `length` tokens, by naive_blocks.py."""
    case, target, row = CASES[name], target_of(family), text(1, 12, V)
    states = target(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states
    features = torch.cat([states[at][0, : length - 1] for at in ENTERS], dim=-1)
    return block(*published(case), target, features, [row[length - 1], *AFTER], case.block - 1 + case.anchored)


def reference(name: str, family: str) -> dict[int, Tensor]:
    """By the tokens of the row: logits [drafts, n / 4] of each position of the block, of every fourth id."""
    if CASES[name].kind in NAIVE:
        return {length: naive(name, family, length)[:, ::4] for length in (9, 12)}
    if not speculators.IMPORTABLE:
        stored = json.loads(NUMBERS.read_text())[f"{name}, {family}"]
        return {int(length): torch.tensor(numbers) for length, numbers in stored.items()}
    case, target, row = CASES[name], target_of(family), text(1, 12, V)
    model = speculators.block_made(*published(case._replace(style="speculators")), target)
    states = target(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states
    features = torch.cat([states[at][0] for at in ENTERS], dim=-1)
    drafts = case.block - 1 + case.anchored
    found = {}
    for length in (9, 12):
        path = [row[length - 1], *AFTER]
        find = speculators.parallel if case.kind == "peagle" else speculators.block
        found[length] = find(model, features, [*row[: length - 1], *path], length - 1, drafts)[-drafts:, ::4]
    return found


if __name__ == "__main__":
    made = {
        f"{name}, {family}": {
            length: [[round(value, 5) for value in one] for one in numbers.tolist()]
            for length, numbers in reference(name, family).items()
        }
        for name, case in CASES.items()
        if case.kind not in NAIVE
        for family in ("Llama", "Qwen3")
    }
    NUMBERS.write_text(json.dumps(made) + "\n")
