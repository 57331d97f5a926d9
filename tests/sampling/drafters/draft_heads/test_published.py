"""Published EAGLE heads: each naming and option gives the logits of a naive forward written from the papers.

The forward here knows no cache and no sessions: a token at a time, attention over a list. The package `speculators`,
where it is installed (requirements-dev.txt), is one more reference.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sampling.drafters.draft_heads.checkpoint import load_student
from sampling.drafters.draft_heads.eagle import FeatureLM
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.published import translated
from sampling.drafters.draft_model import ModelSource
from sampling.drafters.proposal import Proposer
from sampling.models.causal import CausalLM
from sampling.types import Draft
from tests.support import speculators
from tests.support.refusals import refused
from tests.support.runs import answers, greedy, sampler
from tests.support.students import close, fed, make_drafter, make_target, text
from utils.catalogue.catalogue import head_kind

V, G, HEAD, NOTHING = 40, 24, 8, Draft.empty(1)
SHORT = [0, 2, 3, 5, 8, 13, 21, 34, 39]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16


class Case(NamedTuple):
    """How a head is published. `style`: midlayer, speculators or one (EAGLE-1); `store`: bin, whole or shards."""

    style: str
    store: str
    options: dict[str, Any] = {}  # noqa: RUF012  # read only
    qk: bool = False
    embedding: int = 0  # of its own, and its width
    short: bool = True
    prefix: str = ""
    bias: bool = False
    layers: int = 1
    all_biases: bool = False
    order: tuple[int, ...] = (2, 4, 5)


CASES = {
    "the authors'": Case("midlayer", "bin"),
    "a prefix, all ids": Case("midlayer", "whole", prefix="model.", short=False),
    "speculators in shards": Case("speculators", "shards", {"norm_before_residual": True}, embedding=G),
    "normed states, Qwen3": Case("speculators", "whole", {"norm_before_fc": True, "norm_output": True}, qk=True),
    "each state normed": Case("speculators", "whole", {"fc_norm": True}, embedding=16, bias=True),
    "two layers": Case("speculators", "whole", {"norm_output": True, "norm_before_residual": True}, layers=2),
    "layers in another order": Case("speculators", "whole", order=(5, 2, 4)),
    "biases everywhere": Case("speculators", "whole", bias=True, all_biases=True, layers=2),
    "EAGLE-1": Case("one", "bin", short=False),
    "EAGLE-1 with biases": Case("one", "bin", short=False, bias=True, layers=2),
}


def large(**changes: Any) -> Any:
    """A target of eight layers: EAGLE-3 reads what enters layers 2, 4 and 5. Logits are compared in double precision:
    in single precision the rounding of such a target, which differs by processor, moves a draft by 3e-5."""
    return make_target(V, seed=10, num_hidden_layers=8, **changes)


def published(case: Case) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors, named bare (`layers.0.` …)."""
    one, noise = case.style == "one", torch.Generator().manual_seed(3)
    width = G if one or not case.embedding else case.embedding

    def drawn(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=noise)
        return 1 + 0.3 * made if len(shape) == 1 else 1.5 * made / shape[-1] ** 0.5

    tensors = {"fc.weight": drawn(width, 2 * G if one else 3 * G)}
    if one and case.bias:
        tensors["fc.bias"] = drawn(width) - 1
    for at in range(case.layers):
        layer, read = f"layers.{at}.", width if one or at else 2 * width
        for name, rows in (("q", 4), ("k", 2), ("v", 2)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = drawn(rows * HEAD, read)
            if case.bias:
                tensors[f"{layer}self_attn.{name}_proj.bias"] = drawn(rows * HEAD) - 1
        tensors[f"{layer}self_attn.o_proj.weight"] = drawn(width, 4 * HEAD)
        tensors |= {f"{layer}mlp.{name}_proj.weight": drawn(32, width) for name in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = drawn(width, 32)
        if case.all_biases:
            wide = {"self_attn.o": width, "mlp.gate": 32, "mlp.up": 32, "mlp.down": width}
            tensors |= {f"{layer}{name}_proj.bias": drawn(rows) - 1 for name, rows in wide.items()}
        tensors[f"{layer}post_attention_layernorm.weight"] = drawn(width)
        if not one or at:
            tensors[f"{layer}input_layernorm.weight"] = drawn(width)
        if not one and not at:
            tensors[f"{layer}hidden_norm.weight"] = drawn(width)
        if case.qk:
            tensors |= {f"{layer}self_attn.{name}_norm.weight": drawn(HEAD) for name in "qk"}
    if not one:
        tensors |= {"norm.weight": drawn(width), "lm_head.weight": drawn(len(SHORT) if case.short else V, width)}
    if case.embedding:
        tensors["embed_tokens.weight"] = drawn(V, width)
    if case.options.get("norm_before_fc"):
        tensors["input_norm.weight"] = drawn(3 * G)
    if case.options.get("fc_norm"):
        tensors |= {f"fc_norm.{at}.weight": drawn(G) for at in range(3)}
    if case.short:
        tensors["d2t"] = torch.tensor(SHORT) - torch.arange(len(SHORT))
        tensors["t2d"] = torch.tensor([token in SHORT for token in range(V)])
    inner = {
        "model_type": "llama", "vocab_size": V, "hidden_size": width, "num_attention_heads": 4, "head_dim": HEAD,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "max_position_embeddings": 12,
        "num_hidden_layers": 40, "rope_scaling": LLAMA3 if case.style == "midlayer" else None,
    }  # fmt: skip
    if case.style != "speculators":
        return {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(SHORT), **inner}, tensors
    made = {"algorithm": "eagle3", "verifier": {"name_or_path": "org/Large-8B"}}
    told = {"speculators_model_type": "eagle3", "speculators_config": made, "transformer_layer_config": inner}
    return {**told, "eagle_aux_hidden_state_layer_ids": list(case.order), **case.options}, tensors


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], case: Case) -> Path:
    """The folder as its producer writes it."""
    folder.mkdir(exist_ok=True)
    middle = "midlayer." if case.style == "midlayer" else "layers.0."
    named = {case.prefix + name.replace("layers.0.", middle): value for name, value in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    if case.store == "bin":
        torch.save(named, folder / "pytorch_model.bin")
    elif case.store == "whole":
        save_file(named, folder / "model.safetensors")
    else:
        names = sorted(named)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, of in parts.items():
            save_file({name: named[name] for name in of}, folder / file)
        index = {"weight_map": {name: file for file, of in parts.items() for name in of}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def loaded(folder: Path, name: str, target: Any) -> DraftHead:
    case = CASES[name]
    place = written(folder / "head", *published(case), case)
    assert head_kind(place) == "eagle"
    return load_student(place, target)


# -- a forward from the papers --------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def frequencies(scaled: bool) -> list[float]:
    """Llama 3's (transformers' documentation of `rope_type: llama3`), or the plain ones."""
    found = []
    for at in range(HEAD // 2):
        one = 500.0 ** (-2 * at / HEAD)
        long = 2 * torch.pi / one
        smooth = (16 / long - 1.0) / (4.0 - 1.0)
        mixed = (1 - smooth) * one / 4 + smooth * one
        found.append(one if not scaled or long < 4 else one / 4 if long > 16 else mixed)
    return found


def turn(x: Tensor, position: int, scaled: bool) -> Tensor:
    """[heads, D] turned in the plane of dimensions i and i + D/2."""
    angle = position * torch.tensor(frequencies(scaled), dtype=x.dtype)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Naive:
    def __init__(self, case: Case, target: Any) -> None:
        self.case, self.config = case, published(case)[0]
        self.tensors = {name: value.double() for name, value in published(case)[1].items()}
        self.target = target
        self.embedding = self.tensors.get("embed_tokens.weight", target.get_input_embeddings().weight.double())

    def features(self, ids: list[int]) -> Tensor:
        out = self.target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        if self.case.style == "one":
            return out[-1][0].double()
        parts = [out[at][0].double() for at in self.case.order]
        if "fc_norm.0.weight" in self.tensors:
            parts = [rms(part, self.tensors[f"fc_norm.{at}.weight"]) for at, part in enumerate(parts)]
        x = torch.cat(parts, dim=-1)
        if "input_norm.weight" in self.tensors:
            x = rms(x, self.tensors["input_norm.weight"])
        return x @ self.tensors["fc.weight"].T

    def layer(self, at: int, x: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        get = lambda name: self.tensors[f"layers.{at}.{name}.weight"]  # noqa: E731
        residual = read = x
        if at == 0 and self.case.style != "one":
            token, state = x.chunk(2)
            normed = rms(state, get("hidden_norm"))
            read = torch.cat((rms(token, get("input_layernorm")), normed))
            residual = normed if self.case.options.get("norm_before_residual") else state
        elif at:
            read = rms(x, get("input_layernorm"))
        read_by = [get(f"self_attn.{name}_proj") @ read for name in "qkv"]
        if f"layers.{at}.self_attn.q_proj.bias" in self.tensors:
            biases = [self.tensors[f"layers.{at}.self_attn.{name}_proj.bias"] for name in "qkv"]
            read_by = [one + bias for one, bias in zip(read_by, biases, strict=True)]
        query, key, value = (one.view(-1, HEAD) for one in read_by)
        if self.case.qk:
            query, key = rms(query, get("self_attn.q_norm")), rms(key, get("self_attn.k_norm"))
        scaled = self.case.style == "midlayer"
        seen.append((turn(key, position, scaled), value))
        query, mixed = turn(query, position, scaled), []
        for head in range(4):
            scores = torch.stack([query[head] @ keys[head // 2] for keys, _ in seen]) / HEAD**0.5
            mixed.append(scores.softmax(0) @ torch.stack([values[head // 2] for _, values in seen]))
        bias = {
            name: self.tensors.get(f"layers.{at}.{name}_proj.bias", 0.0)
            for name in ("self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        }
        x = residual + get("self_attn.o_proj") @ torch.cat(mixed) + bias["self_attn.o"]
        inner = rms(x, get("post_attention_layernorm"))
        gate, up = (get(f"mlp.{name}_proj") @ inner + bias[f"mlp.{name}"] for name in ("gate", "up"))
        return x + get("mlp.down_proj") @ (gate * gate.sigmoid() * up) + bias["mlp.down"]

    @torch.no_grad()
    def logits(self, ids: list[int], held: int) -> Tensor:
        """[len(ids) − 1, V] behind tokens 1 …, of which the target has read the first `held`."""
        states, found = list(self.features(ids[:held])), []
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.case.layers)]
        for position in range(1, len(ids)):  # its own numbering begins with 0; only differences count
            x = torch.cat((self.embedding[ids[position]], states[position - 1]))
            if self.case.style == "one":
                x = self.tensors["fc.weight"] @ x + self.tensors.get("fc.bias", 0.0)
            for at in range(self.case.layers):
                x = self.layer(at, x, position - 1, seen[at])
            out = x if self.case.style == "one" else rms(x, self.tensors["norm.weight"])
            if position >= held:
                states.append(out if self.case.options.get("norm_output") else x)
            if self.case.style == "one":
                found.append(self.target.lm_head.weight.double() @ out)
                continue
            row = torch.full((V,), float("-inf"), dtype=torch.float64)
            row[torch.tensor(SHORT if self.case.short else range(V))] = self.tensors["lm_head.weight"] @ out
            found.append(row)
        return torch.stack(found)


# -- what a head says -----------------------------------------------------------------------------


class Theirs:
    """The same from the package *speculators*. Of EAGLE-3 heads as wide as their target: of others it has no model."""

    def __init__(self, case: Case, target: Any) -> None:
        config, tensors = published(case)
        inner = dict(config.get("transformer_layer_config", config))
        inner |= {"intermediate_size": 32, "num_hidden_layers": case.layers, "attention_bias": case.bias}
        inner["mlp_bias"] = case.all_biases
        inner["model_type"] = "qwen3" if case.qk else "llama"
        inner["rope_parameters"] = {"rope_type": "default", **(inner.pop("rope_scaling") or {})}
        inner["rope_parameters"]["rope_theta"] = inner.pop("rope_theta")
        self.model = speculators.made({**config, "transformer_layer_config": inner}, tensors, target)
        self.target, self.order, self.ids = target, case.order, torch.tensor(SHORT if case.short else range(V))

    @torch.no_grad()
    def logits(self, ids: list[int], held: int) -> Tensor:
        """[1, V] behind the last token: the draft after those that the target has not read."""
        states = self.target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([states[at][0] for at in self.order], dim=-1)
        step = len(ids) - 1 - held
        row = torch.full((V,), float("-inf"))
        row[self.ids] = speculators.steps(self.model, features, ids, step + 1)[step][held - 1]
        return row[None]


REFERENCES: list[tuple[str, Any]] = [(name, Naive) for name in CASES]
if speculators.IMPORTABLE:
    REFERENCES += [(name, Theirs) for name, case in CASES.items() if case.style != "one" and case.embedding in (0, G)]


@pytest.mark.parametrize(("name", "reference"), REFERENCES)
def test_three_recycled_drafts_have_the_logits_of_the_reference(name: str, reference: Any, tmp_path: Path) -> None:
    target = large(dtype=torch.float64)
    student, naive = loaded(tmp_path, name, target), reference(CASES[name], target)
    lm, row = FeatureLM(student, "eagle"), text(1, 9, V)
    session = lm.open([row], target=fed(target, [row], [8], hidden=lm.reads_hidden))
    for draft in (7, 0, 33, 5):
        close(session.score([row], NOTHING)[0, 0], naive.logits(row, 8)[-1])
        row = [*row, draft]
    # The target has moved by two tokens: what stood in for its states goes.
    session = lm.open([row], previous=session, target=fed(target, [row], [10], hidden=lm.reads_hidden))
    close(session.score([row], NOTHING)[0, 0], naive.logits(row, 10)[-1])


def by_lot(seed: int) -> Case:
    """A head of any configuration."""
    chance = random.Random(seed)
    norms = [{}, {"norm_before_fc": True}, {"fc_norm": True}][chance.randrange(3)]
    options = {name: True for name in ("norm_before_residual", "norm_output") if chance.random() < 0.5}
    order = chance.sample(range(1, 8), 3)
    bias = chance.random() < 0.5
    return Case(
        "speculators",
        chance.choice(("bin", "whole", "shards")),
        {**norms, **options},
        qk=chance.random() < 0.3,
        embedding=chance.choice((0, G, 16)),
        short=chance.random() < 0.5,
        bias=bias,
        layers=chance.randrange(1, 3),
        all_biases=bias and chance.random() < 0.6,
        order=(order[0], order[1], order[2]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_head_of_any_configuration_has_the_logits_of_the_reference_or_one_line(seed: int, tmp_path: Path) -> None:
    """Norms, biases, widths, layers and the target's layers in any order; without any one of its tensors, one line."""
    case, target = by_lot(seed), large(dtype=torch.float64)
    config, tensors = published(case)
    student, naive = load_student(written(tmp_path / "head", config, tensors, case), target), Naive(case, target)
    lm, row = FeatureLM(student, "eagle"), text(seed, 9, V)
    session = lm.open([row], target=fed(target, [row], [8], hidden=lm.reads_hidden))
    for draft in (7, 0, 33):
        close(session.score([row], NOTHING)[0, 0], naive.logits(row, 8)[-1])
        row = [*row, draft]
    spare = {"embed_tokens.weight", "t2d"} | (set() if case.short else {"lm_head.weight"})  # the target's serve
    gone = random.Random(seed).choice([name for name in tensors if name not in spare])
    rest = {name: tensor for name, tensor in tensors.items() if name != gone}
    assert "\n" not in refused(load_student, written(tmp_path / "less", config, rest, case), target)


@pytest.mark.parametrize("name", CASES)
def test_a_tree_has_them_node_by_node_and_rows_beside_each_other_too(name: str, tmp_path: Path) -> None:
    target = large(dtype=torch.float64)
    student, naive = loaded(tmp_path, name, target), Naive(CASES[name], target)
    lm, row = FeatureLM(student, "eagle"), text(2, 7, V)
    session: Any = lm.open([row], target=fed(target, [row], [6], hidden=lm.reads_hidden))
    session.score_reduced([row], NOTHING)
    session.grow([4, 9], [-1, -1])
    for got, path in zip(session.grow([4, 9, 1, 30], [-1, -1, 1, 0]), ([9, 1], [4, 30]), strict=True):
        wanted = naive.logits([*row, *path], 6)[-1]
        close(got, wanted[wanted.isfinite()])
    rows = [row, text(3, 4, V), text(4, 2, V)]
    together = lm.open(rows, target=fed(target, rows, [6, 3, 1], hidden=lm.reads_hidden))
    for _ in range(2):
        found = together.score(rows, Draft.empty(3))
        for at, held in enumerate((6, 3, 1)):
            close(found[at, 0], naive.logits(rows[at], held)[-1])
        rows = [[*one, 11] for one in rows]


@pytest.mark.parametrize("name", CASES)
def test_text_is_plain_decodings_in_chains_and_trees(name: str, tmp_path: Path) -> None:
    target = large()
    student, lm = loaded(tmp_path, name, target), CausalLM(target)
    prompts = [text(5, 9, V), text(6, 3, V)]
    for drawing in (greedy, lambda: sampler(0.8, 3, coupling="gumbel")):
        assert answers(lm, prompts, make_drafter(student), drawing(), length=10) == answers(
            lm, prompts, None, drawing(), length=10
        )
    tree = Proposer([ModelSource(FeatureLM(student, "eagle"))], tree=True)
    for seed in range(2):
        tree_text, plain = (
            answers(lm, prompts[:1], drafter, sampler(0.9, seed), length=10) for drafter in (tree, None)
        )
        assert tree_text == plain


def test_rows_of_a_head_in_another_order_are_put_in_order(tmp_path: Path) -> None:
    target, case = large(), CASES["the authors'"]
    config, tensors = published(case)
    wanted = load_student(written(tmp_path / "a", config, tensors, case), target)
    order = torch.randperm(len(SHORT), generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = torch.tensor(SHORT)[order] - torch.arange(len(SHORT))
    found = load_student(written(tmp_path / "b", config, tensors, case), target)
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.lm_head.weight, wanted.lm_head.weight)


@pytest.mark.parametrize(
    ("stored", "layers", "reads"),
    [
        ({}, 8, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, 36, (2, 18, 33)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}, 94, (2, 47, 91)),  # converted, the numbers were not
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, 61, (2, 30, 58)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 9, 20]}}, 61, (4, 10, 21)),
    ],
)
def test_which_states_are_read(stored: dict[str, Any], layers: int, reads: tuple[int, ...]) -> None:
    config, tensors = published(CASES["the authors'"])
    large_config = large().config
    large_config.num_hidden_layers = layers
    assert translated({**config, **stored}, tensors, large_config, Path("head"))[0]["reads"] == reads


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"speculators_model_type": "medusa"}, "is a medusa head, which is not read"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"reads states \[2, 4, 9\]: a target of 8 layers"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "no list of layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"hidden size 36 \(org/Large-8B\), this one has 24"),
        ({"d2t": torch.zeros(len(SHORT), dtype=torch.long)}, "d2t, t2d and lm_head have different ids"),
        ({"d2t": None, "t2d": None}, "has a head of 9 ids and no d2t"),
        ({"t2d": torch.zeros(V + 1, dtype=torch.bool)}, r"vocabulary of 41 ids \(org/Large-8B\), this one has 40"),
        ({"fc.weight": None}, "lacks fc.weight"),
        ({"layers.0.mlp.down_proj.weight": None}, "lacks model.layers.0.mlp.down_proj.weight"),
        ({"layers.0.mlp.gate_proj.weight": None}, "lacks layers.0.mlp.gate_proj.weight"),
        ({"layers.0.mlp.up_proj.bias": torch.zeros(32)}, "which nothing reads"),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [2, 1, 1]}}, "has mrope rotary positions"),
        ({"rms_norm_eps": "small"}, "is damaged: rms_norm_eps is .small."),
        ({"rope_theta": [1]}, "cannot be read: TypeError"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    case = CASES["speculators in shards"]._replace(store="whole", embedding=0)
    config, tensors = published(case)
    for name, value in changes.items():
        parts: list[dict[str, Any]] = [config, config["transformer_layer_config"], tensors]
        part = parts[0 if "speculators" in name or "eagle" in name else 1 if name.startswith("r") else 2]
        part[name] = value
        if value is None:
            del part[name]
    refused(load_student, written(tmp_path / "head", config, tensors, case), large(), match=told)


def test_a_head_for_another_target_is_refused_by_its_name(tmp_path: Path) -> None:
    case = CASES["speculators in shards"]
    place = written(tmp_path / "head", *published(case), case)
    for name in (None, "org/Large-8B", "copies/large-8b"):
        assert load_student(place, large(), name=name).config.kind == "eagle"
    refused(load_student, place, large(), name="org/Other-8B", match="is for org/Large-8B, this target is org/Other-8B")
    refused(load_student, place, large(hidden_size=32), match=r"hidden size 24 \(org/Large-8B\), this one has 32")
