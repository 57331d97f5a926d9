"""A draft head that is trained further begins as what it was, with a new recency too."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.sampling.drafters.draft_heads.test_network import target_kv
from tests.support.students import KINDS, make_student, make_target, text
from training.draft_heads.build import continued

CPU = torch.device("cpu")


def inputs(kind: str, target: Any, layers: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = text(3, 20)
    more: dict[str, Any] = {}
    if kind == "glide":
        more["kv"] = [tuple(part.clone() for part in target_kv(target, ids, layer)) for layer in layers]
    if kind == "feature":
        more["hidden"] = torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(0))
    return torch.tensor([ids]), more


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "eagle"])  # published ones are not trained here
def test_it_computes_the_same_and_can_learn(kind: str) -> None:
    target = make_target()
    old = make_student(kind, target, short=[1, 2, 3, 8, 13, 21, 34, 39], num_hidden_layers=2)
    ids, more = inputs(kind, target, old.target_layers(3))
    before = old.states(ids, **more)[0]
    new = continued(old, replace(old.config, block_size=3, window=9), CPU)
    view = {"lag": 1} if kind == "glide" else {}  # the mask of blocks is another with other blocks
    assert torch.equal(new.states(ids, **more, **view)[0], old.states(ids, **more, **view)[0])
    trained = {name for name, parameter in new.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in new.named_parameters()}  # this student's embedding is its own
    new.states(ids, **more)[0].square().sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in new.parameters():
            if parameter.grad is not None and parameter is not new.model.embed_tokens.weight:
                parameter -= 0.1 * parameter.grad
    assert not torch.allclose(new.states(ids, **more)[0], before)
    assert torch.equal(old.states(ids, **more)[0], before)  # its weights are its own


def test_new_states_change_nothing_at_first_and_are_learned_from() -> None:
    old = make_student("feature", make_target())
    ids, more = inputs("feature", None, [])
    read = torch.randn(1, 20, 48, generator=torch.Generator().manual_seed(1))
    several = continued(old, replace(old.config, reads=(-1, 0, 2)), CPU)
    (found,) = several.states(ids, torch.cat((more["hidden"], read), dim=-1))
    torch.testing.assert_close(found, old.states(ids, **more)[0])
    found.square().sum().backward()  # type: ignore[no-untyped-call]
    slope = several.model.join_feature.weight.grad
    assert slope is not None
    assert (slope[:, 24:].abs().amax(dim=0) > 0).all()


def test_a_shared_embedding_is_not_copied_and_not_trained() -> None:
    old = make_student("plain", make_target(), hidden_size=24, num_attention_heads=4, head_dim=6)
    new = continued(old, replace(old.config, shared_embedding=True), CPU)
    assert new.model.embed_tokens.weight.data_ptr() == old.model.embed_tokens.weight.data_ptr()
    assert not new.model.embed_tokens.weight.requires_grad
    assert new.lm_head.weight.requires_grad


def test_new_recency_changes_nothing_at_first_and_old_one_stays() -> None:
    target = make_target()
    old = make_student("glide", target)
    ids, more = inputs("glide", target, old.target_layers(3))
    leaning = continued(old, replace(old.config, recency=True), CPU)
    for lag in (0, 2):
        torch.testing.assert_close(leaning.states(ids, **more, lag=lag)[0], old.states(ids, **more, lag=lag)[0])
    cross: Any = leaning.model.layers[0].cross_attn
    assert cross.recency.requires_grad
    with torch.no_grad():
        cross.recency.fill_(1.5)
    again: Any = continued(leaning, leaning.config, CPU).model.layers[0].cross_attn
    assert again.recency.tolist() == [1.5] * 4
