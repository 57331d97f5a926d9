"""The fast pass of a student, token by token with a cache, equals `DraftHead.states` over the whole sequence.

This is what lets training and drafting agree: the oracle is the very code that students are trained with.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.eagle import FeatureLM
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.models.causal import CausalLM
from sampling.types import Draft
from tests.support.refusals import refused
from tests.support.students import close, fed, make_student, make_target, spread_logits, text
from utils.kernels.bindings import at_hand

SHORT = [1, 2, 3, 8, 13, 21, 34, 39]
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, short list": {"num_hidden_layers": 2, "short": SHORT},
    "short list": {"short": SHORT},
    "no groups": {"num_key_value_heads": 4, "num_hidden_layers": 2},
    "recency, short list": {"recency": True, "short": SHORT},
    "recency, two layers": {"num_hidden_layers": 2, "recency": True},
}
NOTHING = Draft.empty(1)


def some(kind: str, shape: str, dtype: torch.dtype = torch.float32) -> tuple[Any, DraftHead]:
    target = make_target(dtype=dtype)
    return target, make_student(kind, target, dtype=dtype, **SHAPES[shape])


def precision(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 1e-5  # rotary angles and norms of the student are float32 throughout


pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")  # a float64 student's norms round to float32
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["packed", "unpacked"])


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_plain_student_in_pieces_equals_the_whole(shape: str, dtype: torch.dtype) -> None:
    _, student = some("plain", shape, dtype)
    ids = text(1, 30)
    wanted = spread_logits(student, student.states(torch.tensor([ids]))[0])[0]
    session = CausalLM(StudentNetwork(student)).open([ids])
    for end in (9, 10, 11, 19, 20):
        close(session.score([ids[:end]], NOTHING)[0, 0], wanted[end - 1], precision(dtype))
    close(session.score([ids[:20]], Draft.of([ids[20:26]]))[0], wanted[19:26], precision(dtype))
    session.commit([[0, 1, 2]])
    close(session.score([ids[:24]], NOTHING)[0, 0], wanted[23], precision(dtype))


def test_ragged_rows_of_a_plain_student_equal_each_row_alone() -> None:
    _, student = some("plain", "two layers, short list")
    rows = [text(2, 5), text(3, 12), text(4, 1)]
    session = CausalLM(StudentNetwork(student)).open(rows)
    for extra in ([], [7], [9, 4]):
        rows = [row + extra for row in rows]
        got = session.score(rows, Draft.empty(3))
        for place, row in enumerate(rows):
            close(got[place, 0], spread_logits(student, student.states(torch.tensor([row]))[0])[0, -1])


def test_the_short_logits_are_the_wide_ones_without_the_rest() -> None:
    _, student = some("plain", "short list")
    ids = text(5, 9)
    session = CausalLM(StudentNetwork(student)).open([ids])
    wide = session.score([ids], NOTHING)
    short = session.score_reduced([ids], NOTHING)
    assert session.reduced_ids is not None
    assert session.reduced_ids.tolist() == SHORT
    assert short.shape == (1, 1, len(SHORT))
    assert torch.allclose(wide[..., SHORT], short, atol=1e-6)


def test_hidden_states_are_those_the_head_is_applied_to() -> None:
    _, student = some("plain", "short list")
    ids = text(6, 8)
    session = CausalLM(StudentNetwork(student)).open([ids], hidden=True)
    session.score([ids[:5]], NOTHING)
    session.score([ids], NOTHING)
    close(session.hidden(), student.states(torch.tensor([ids]))[0])


# -- GLIDE ----------------------------------------------------------------------------------------


@torch.no_grad()
def beside(student: DraftHead, target: Any, ids: list[int], valid: int) -> Tensor:
    """[T, V]: the whole sequence at once, position p seeing target keys j < min(p, valid), position 0 key 0."""
    kv = [target_kv(target, ids, layer) for layer in student.target_layers(3)]
    count = len(ids)
    place, positions = torch.arange(count), torch.arange(count)[None]
    seen = (place[None] < place[:, None].clamp(min=1)) & (place < valid)[None]
    x = student.model.embed_tokens(torch.tensor([ids]))
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    assert student.cross_rotary is not None
    for index, layer in enumerate(student.model.layers):
        x = layer(x, student.rotary(positions), mask, [], (kv[index], student.cross_rotary(positions), seen))
    x = student.model.norm(x)
    return spread_logits(student, x)[0]


def target_kv(target: Any, ids: list[int], layer: int) -> tuple[Tensor, Tensor]:
    return fed(target, [ids], [len(ids)]).kv(layer)[:2]


@DTYPES
def test_float32_weights_are_packed_copies_and_others_the_students_own(dtype: torch.dtype) -> None:
    _, student = some("plain", "one layer", dtype)
    session = CausalLM(StudentNetwork(student)).open([[1, 2]])
    student.lm_head.weight.data.zero_()
    assert bool(session.score([[1, 2]], NOTHING).any()) == (dtype == torch.float32 and at_hand())


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_glide_student_in_pieces_equals_the_whole(shape: str, dtype: torch.dtype) -> None:
    target, student = some("glide", shape, dtype)
    ids = text(7, 24)
    for valid in (1, 9, 16, 17):
        wanted = beside(student, target, ids, valid)
        session = GlideLM(student, 3).open([ids], target=fed(target, [ids], [valid]))
        for end in (6, 7, 14, 15, 17):
            close(session.score([ids[:end]], NOTHING)[0, 0], wanted[end - 1], precision(dtype))
        close(session.score([ids[:17]], Draft.of([ids[17:23]]))[0], wanted[16:23], precision(dtype))


@DTYPES
@pytest.mark.parametrize("shape", ["short list", "recency, short list"])
def test_a_glide_draft_at_each_depth_is_what_it_was_trained_for(shape: str, dtype: torch.dtype) -> None:
    """Depth d of a draft sees what training's lag d shows, and what the d-th place of a block shows."""
    target, student = some("glide", shape, dtype)
    ids, block = text(8, 21), student.config.block_size
    kv = [target_kv(target, ids, layer) for layer in student.target_layers(3)]
    whole = torch.tensor([ids])
    lagging = [spread_logits(student, student.states(whole, kv=kv, lag=lag)[0])[0] for lag in range(block)]
    lm, target_session = GlideLM(student, 3), fed(target, [ids], [1])
    session = lm.open([ids[:1]], target=target_session)
    for length in range(2, len(ids) - block):
        target_session.score([ids[: length - 1]], NOTHING)
        blocks = spread_logits(student, student.states(whole, kv=kv, offset=(1 - length) % block)[0])[0]
        for depth in range(block):
            got = session.score([ids[: length + depth]], NOTHING)[0, 0]
            place = length - 1 + depth
            close(got, lagging[depth][place], precision(dtype))
            if length - 1 >= block:  # before that training's first block is causal
                close(got, blocks[place], precision(dtype))


@pytest.mark.parametrize("shape", ["one layer", "two layers, short list", "recency, two layers"])
def test_ragged_rows_of_a_glide_student_equal_each_row_alone(shape: str) -> None:
    target, student = some("glide", shape)
    rows, held = [text(9, 14), text(10, 6), text(11, 3)], [11, 5, 2]
    session = GlideLM(student, 3).open(rows, target=fed(target, rows, held))
    got = session.score(rows, Draft.of([[1, 2], [3, -1], [4, 5]]))
    for place, (row, more, valid) in enumerate(zip(rows, ([1, 2], [3], [4, 5]), held, strict=True)):
        close(got[place, : len(more) + 1], beside(student, target, row + more, valid)[len(row) - 1 :])


def test_without_a_key_cross_attention_adds_nothing() -> None:
    target, student = some("glide", "one layer")
    ids = text(14, 5)
    session = GlideLM(student, 3).open([ids], target=fed(target, [ids], [0]))
    close(session.score([ids], NOTHING)[0, 0], spread_logits(student, student.states(torch.tensor([ids]))[0])[0, -1])


# -- feature --------------------------------------------------------------------------------------


EAGLE: dict[str, dict[str, Any]] = {
    "eagle, as trained here": {
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "short": SHORT,
    },
    "eagle, as first published": {"short": SHORT},
    "eagle, two layers, Qwen3": {"num_hidden_layers": 2, "fc_norm": True, "qk_norm": True},
}


@DTYPES
@pytest.mark.parametrize("shape", [*SHAPES, *EAGLE])
def test_a_feature_draft_at_each_depth_is_what_it_was_trained_for(shape: str, dtype: torch.dtype) -> None:
    """Four drafted steps after every prefix, one session all along: step s equals training's step s. Nothing looks back
    to EAGLE-3's token 0. The target is exact: with these norms a head makes 2e-5 of its rounding."""
    target, ids, kind = make_target(dtype=torch.float64), text(15, 20), "eagle" if shape in EAGLE else "feature"
    student = make_student(kind, target, dtype=dtype, **(SHAPES | EAGLE)[shape])
    reads = student.config.reads or (-1,)
    features = fed(target, [ids], [len(ids)], hidden=reads).hidden(reads)
    steps = student.states(torch.tensor([ids]), hidden=features, steps=4)
    wanted = [spread_logits(student, states)[0] for states in steps]
    target_session = fed(target, [ids], [1], hidden=reads)
    session = FeatureLM(student, kind).open([ids[:1]], target=target_session)
    for length in (*([1] if shape in EAGLE else []), 2, 3, 4, 7, 8, 15, 16):
        target_session.score([ids[: max(1, length - 1)]], NOTHING)
        for step in range(4) if length > 1 else (0,):
            close(
                session.score([ids[: length + step]], NOTHING)[0, 0], wanted[step][length - 1 + step], precision(dtype)
            )


@pytest.mark.parametrize("shape", ["one layer", "two layers, short list"])
def test_ragged_rows_of_a_feature_student_equal_each_row_alone(shape: str) -> None:
    """Rows at different depths of their drafts, one that stands still, in one pass each."""
    target, student = some("feature", shape)
    whole, held = [text(16, 16), text(17, 8), text(18, 5)], [11, 4, 1]
    target_session = fed(target, whole, held, hidden=True)
    session = FeatureLM(student, "feature").open([row[:1] for row in whole], target=target_session)
    steps = [
        student.states(torch.tensor([row]), hidden=fed(target, [row], [len(row)], hidden=True).hidden(), steps=4)
        for row in whole
    ]
    for depths in ([0, 0, 0], [1, 0, 1], [2, 0, 2], [3, 1, 2]):
        rows = [row[: count + 1 + depth] for row, count, depth in zip(whole, held, depths, strict=True)]
        got = session.score(rows, Draft.empty(3))
        for place, depth in enumerate(depths):
            close(got[place, 0], spread_logits(student, steps[place][depth])[0, held[place] + depth])


def test_a_row_far_ahead_of_its_target_is_read_step_by_step() -> None:
    """Several tokens the target has not seen, at once: each takes the pass it would have taken in a draft."""
    target, student = some("feature", "two layers, short list")
    ids = text(19, 12)
    last = student.states(torch.tensor([ids]), hidden=fed(target, [ids], [len(ids)], hidden=True).hidden(), steps=4)[3]
    session = FeatureLM(student, "feature").open([ids], target=fed(target, [ids], [8], hidden=True))
    close(session.score([ids], NOTHING)[0, 0], spread_logits(student, last)[0, 11])


def test_a_feature_student_reviews_nothing_and_needs_states() -> None:
    target, student = some("feature", "one layer")
    lm, ids = FeatureLM(student, "feature"), text(20, 6)
    assert not lm.reviews
    refused(lm.open, [ids], target=fed(target, [ids], [5]), match="hidden=True")
    refused(CausalLM(StudentNetwork(student)).open([ids]).score, [ids], NOTHING, kind=ValueError, match="target")


# -- weights --------------------------------------------------------------------------------------


def test_sixteen_bits_go_unpacked() -> None:
    _, student = some("plain", "short list")
    ids = text(22, 9)
    exact = CausalLM(StudentNetwork(student)).open([ids]).score_reduced([ids], NOTHING)
    rounded = CausalLM(StudentNetwork(student.bfloat16())).open([ids]).score_reduced([ids], NOTHING)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("kind", ["plain", "feature"])
def test_a_student_of_another_kind_is_refused(kind: str) -> None:
    target, student = some(kind, "one layer")
    refused(GlideLM, student, 3, match=kind)
    refused(GlideLM(make_student("glide", target), 3).open, [[1]], match="target")


@pytest.mark.parametrize("kind", ["plain", "glide"])
def test_a_window_hides_what_lies_before_it(kind: str) -> None:
    """Of one layer: keys depend on their token alone and rotation is relative, so the window's tokens give the same."""
    target, student = some(kind, "one layer")
    ids, window = text(11, 20), 6
    long = CausalLM(StudentNetwork(student)).open([ids]).score([ids], NOTHING)[0, 0]
    short = CausalLM(StudentNetwork(student)).open([ids]).score([ids[-window:]], NOTHING)[0, 0]
    assert (long - short).abs().max() > 1e-3
    student.config = replace(student.config, window=window)
    session = CausalLM(StudentNetwork(student)).open([ids])
    for end in range(1, len(ids) + 1):
        last = session.score([ids[:end]], NOTHING)[0, 0]
    close(last, short, 1e-5)
    if kind == "glide":
        beside = CausalLM(target).open([ids])
        beside.score([ids[:-1]], NOTHING)
        near, far = (glided(replace(student.config, window=size), student, ids, beside, target) for size in (window, 0))
        assert (near - far).abs().max() > 1e-4


def glided(config: DraftHeadConfig, student: DraftHead, ids: list[int], beside: Any, target: Any) -> Tensor:
    """The logits of the last token behind the others, with another configuration."""
    student.config = config
    session = GlideLM(student, target.config.num_hidden_layers).open([ids], target=beside)
    session.score([ids[:-1]], NOTHING)
    return session.score([ids], NOTHING)[0, 0]
