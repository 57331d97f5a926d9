"""A new student for a target: its shape, and what it starts from. Knows no data but the short list."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from sampling.drafters.draft_heads.checkpoint import target_rotary
from sampling.drafters.draft_heads.config import StudentConfig
from sampling.drafters.draft_heads.modules import Layer, Student
from utils.errors import UsageError, UserError


def shape_for(target: nn.Module, kind: str, **changes: Any) -> StudentConfig:
    """A student's shape: the target's own width and heads, one layer, what is not given in `changes`.

    Raises UserError for a target whose shape cannot be read, UsageError for numbers that do not go together.
    """
    large: Any = target.config.get_text_config()  # type: ignore[operator, union-attr]
    try:
        width, heads = large.hidden_size, large.num_attention_heads
        size = getattr(large, "head_dim", None) or width // heads
        values: dict[str, Any] = {
            "kind": kind,
            "vocab_size": large.vocab_size,
            "hidden_size": width,
            "intermediate_size": large.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(large, "num_key_value_heads", None) or heads,
            "head_dim": size,
            "large_hidden_size": width,
            "large_num_attention_heads": heads,
            "large_head_dim": size,
            "max_position_embeddings": large.max_position_embeddings,
            "rms_norm_eps": getattr(large, "rms_norm_eps", 1e-5),
            "rope_theta": (getattr(large, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
            "shared_embedding": True,
        }
    except AttributeError as error:
        raise UserError(f"{type(target).__name__} is of no kind a student can be made for: {error}") from None
    given = {name: value for name, value in changes.items() if value is not None}
    values |= given
    if "num_attention_heads" in given and "head_dim" not in given:
        values["head_dim"] = values["hidden_size"] // given["num_attention_heads"]
    own = values["hidden_size"] == width
    if not own and (values.get("shared_head") or (values["shared_embedding"] and "shared_embedding" in given)):
        raise UsageError(f"a student of width {values['hidden_size']} cannot share what has the target's width {width}")
    values["shared_embedding"] = own and values["shared_embedding"]
    if values["num_attention_heads"] * values["head_dim"] <= 0 or values["num_hidden_layers"] < 1:
        raise UsageError("a student needs at least one layer and one head")
    return StudentConfig(**values)


def new_student(
    config: StudentConfig, target: nn.Module, short_list: list[int], init_layers: list[int], seed: int
) -> Student:
    """A student with fresh weights; what has the target's width starts as the target's own.

    Embedding and head rows are the target's where the widths agree; layer i starts as the target's layer
    `init_layers[i]` ([] = from noise).

    Raises:
        UsageError: layers that the target does not have, or of another shape.
    """
    torch.manual_seed(seed)
    student = Student(config, torch.tensor(short_list, dtype=torch.long))
    student.adopt(student.ids, target_rotary(target))
    for module in student.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / 2)
    trunk, model = student.model, cast(Any, target)
    rows = model.get_output_embeddings().weight.detach().float()
    if config.hidden_size == rows.shape[1]:
        embedding = model.get_input_embeddings().weight.detach()
        trunk.embed_tokens.weight = nn.Parameter(embedding.float(), requires_grad=False)
        head = rows[student.ids] if config.short_list else rows
        student.lm_head.weight = nn.Parameter(head.clone())
    if config.project:
        nn.init.eye_(trunk.project.weight)
    if config.kind == "feature":
        for joined in (trunk.join_feature, trunk.join_state):
            if joined.weight.shape[0] == joined.weight.shape[1]:
                nn.init.eye_(joined.weight)
    _start_layers(student, model, init_layers)
    if config.kind == "glide":
        for layer in trunk.layers:
            nn.init.zeros_(cast(Any, layer).cross_attn.o_proj.weight)
    trunk.embed_tokens.weight.requires_grad_(not config.shared_embedding)
    student.lm_head.weight.requires_grad_(not config.shared_head)
    return student


def _start_layers(student: Student, target: Any, chosen: list[int]) -> None:
    if not chosen:
        return
    layers = target.model.layers
    if len(chosen) != len(student.model.layers):
        raise UsageError(f"{len(student.model.layers)} layers cannot start from {len(chosen)} of the target's")
    for own, index in zip(student.model.layers, chosen, strict=True):
        if not 0 <= index < len(layers):
            raise UsageError(f"the target has layers 0 … {len(layers) - 1}, got {index}")
        theirs = dict(layers[index].named_parameters())
        for name, parameter in cast(Layer, own).named_parameters():
            if name not in theirs and not name.startswith("cross_attn"):
                raise UsageError(f"layer {index} of the target cannot start a student's: it has no {name}")
            if name in theirs:
                if theirs[name].shape != parameter.shape:
                    raise UsageError(
                        f"layer {index} of the target cannot start a student's: {name} is {tuple(theirs[name].shape)}, "
                        f"not {tuple(parameter.shape)}"
                    )
                _copy(parameter, theirs[name])


def _copy(own: Tensor, theirs: Tensor) -> None:
    with torch.no_grad():
        own.copy_(theirs.detach().float())


def taken_up(old: Student, config: StudentConfig, device: torch.device) -> Student:
    """A student with the weights of `old`, to be trained further; it shares none but the embedding.

    `config` may differ in window, block size and recency; recency that `old` has not begins with slopes of 0, i.e. as
    if it were not there.
    """
    with torch.device("meta"):  # no memory for parameters that are replaced
        student = Student(config, old.ids)
    weights = {name: value.detach().clone() for name, value in old.state_dict().items() if "embed_tokens" not in name}
    weights["model.embed_tokens.weight"] = old.model.embed_tokens.weight.detach()
    heads = torch.zeros(config.large_num_attention_heads)
    for name in student.state_dict():
        if name.endswith(".recency"):
            weights.setdefault(name, heads.clone())
    student.load_state_dict(weights, assign=True)
    student.requires_grad_(True)
    student.adopt(old.ids, old.cross_rotary)
    student.model.embed_tokens.weight.requires_grad_(not config.shared_embedding)
    student.lm_head.weight.requires_grad_(not config.shared_head)
    return student.to(device)
