"""Cache audit: whatever was done to a session, its logits are those of a model without a cache.

Small random transformers models in float64 go through `CausalLM`: after every round, across turns,
undo, interrupts, forks, selections and ragged batches.
"""

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.types import Draft, Drafter, FixedPace, Limits, Rows, Session
from tests.support.refusals import refused
from tests.support.runs import after, answers, crossed, emitted, greedy, sampler
from tests.support.toys import PointDrafter

V = 40
WINDOW = 24
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SMALL),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": V, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "qwen2": ("Qwen2ForCausalLM", SMALL),
    "mistral, window": ("MistralForCausalLM", {**SMALL, "sliding_window": WINDOW}),
    "gemma2, window": ("Gemma2ForCausalLM", {**SMALL, "head_dim": 8, "sliding_window": WINDOW}),
}
RAGGED = ["llama", "gpt2", "qwen2"]
CLOSE = 1e-5  # transformers' norms and rotations round to float32 in a float64 model too; a wrong cache is off by 0.1
DTYPES = {"float64": (torch.float64, CLOSE), "float32": (torch.float32, 1e-3)}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A random model with spread-out logits; the global generator is left as it was."""
    kind, shape = SHAPES[name]
    kind_class = getattr(transformers, kind)
    config = kind_class.config_class(**shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind_class(config).eval()
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.data.normal_(0.0, 1.5 / weight.shape[1] ** 0.5)
    return model.to(dtype)


_models: dict[tuple[str, torch.dtype], Any] = {}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    if (name, dtype) not in _models:
        _models[name, dtype] = build(name, dtype)
    return _models[name, dtype]


@torch.inference_mode()
def uncached(model: Any, ids: list[int]) -> Tensor:
    """[V] logits behind `ids`, from one pass without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


def audit(session: Session, model: Any, rows: Rows, bound: float = CLOSE) -> None:
    """The session's next logits behind each row; taken from a fork, so that the session is not moved."""
    for row, found in zip(rows, session.fork().score(rows, Draft.empty(len(rows)))[:, 0], strict=True):
        expected = uncached(model, row)
        assert float((found - expected).abs().max()) < bound * max(1.0, float(expected.abs().max()))


def text(seed: int, size: int) -> list[int]:
    return [random.Random(seed).randrange(2, V) for _ in range(size)]


def drafters(model: Any) -> dict[str, Drafter]:
    return {
        "none": NoDrafter(),
        "ngram": NgramDrafter(V, stop_if_unknown=False),
        "itself": ModelDrafter(CausalLM(model, "drafter")),
        "always 3": PointDrafter(V, lambda row: 3),
    }


DRAFTING = ["none", "ngram", "itself", "always 3"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "drafting"), crossed(SHAPES, DRAFTING))
def test_after_every_round_cached_and_uncached_agree(name: str, drafting: str, dtype: str) -> None:
    kind, bound = DTYPES[dtype]
    model = model_of(name, kind)
    lm, prompt = CausalLM(model), text(1, 9)
    session, row = lm.open([prompt]), list(prompt)
    for event in generate(lm, [prompt], drafters(model)[drafting], sampler(0.9), Limits(30), session=session):
        row.extend(emitted([event])[0])
        audit(session, model, [row], bound)
    assert len(row) == 9 + 30


@pytest.mark.parametrize("name", SHAPES)
def test_the_logits_of_every_draft_node(name: str) -> None:
    """Not only the last: position i of a score is what the prefix with i drafts gives."""
    model = model_of(name)
    session = CausalLM(model).open([text(2, 12)])
    row = text(2, 12)
    for turn in range(6):
        drafted = text(10 + turn, 5)
        logits = session.score([row], Draft.of([drafted]))
        assert logits.shape == (1, 6, V)
        for depth in range(6):
            assert torch.allclose(logits[0, depth], uncached(model, row + drafted[:depth]), atol=CLOSE)
        kept = turn % 6
        session.commit([list(range(kept))])
        row = [*row, *drafted[:kept], turn + 2]


@pytest.mark.parametrize("name", SHAPES)
def test_turns_undo_and_regen(name: str) -> None:
    """A conversation that grows, is cut back (deeper than a round and a window) and changes its mind."""
    model = model_of(name)
    lm = CausalLM(model)
    drafting = drafters(model)
    session, row = lm.open([text(3, 10)]), text(3, 10)
    texts = [row]
    for turn, way in enumerate(["ngram", "itself", "always 3", "itself"]):
        row = row + text(20 + turn, 6)
        row = row + answers(lm, [row], drafting[way], sampler(0.9, turn), length=11, session=session)[0]
        audit(session, model, [row])
        texts.append(row)
    for shorter in (texts[3], texts[1], texts[0][:4], texts[4], [*texts[2][:-1], 7, 8, 9]):
        again = answers(lm, [shorter], drafting["itself"], sampler(0.9, 9), length=5, session=session)[0]
        audit(session, model, [shorter + again])
        plain = answers(lm, [shorter], None, sampler(0.9, 9), length=5)[0]
        assert again == answers(lm, [shorter], drafters(model)["itself"], sampler(0.9, 9), length=5)[0]
        assert answers(lm, [shorter], drafting["ngram"], sampler(0.9, 9), length=5, session=session)[0] == plain


@pytest.mark.parametrize(("name", "drafting"), crossed(SHAPES, DRAFTING))
def test_interrupts_and_closed_generators(name: str, drafting: str) -> None:
    model = model_of(name)
    lm, prompt = CausalLM(model), text(6, 14)
    drafter, session = drafters(model)[drafting], lm.open([prompt])
    for looks in (0, 1, 3, 5):
        events = list(
            generate(
                lm,
                [prompt],
                drafter,
                sampler(0.9, looks),
                Limits(20),
                session=session,
                interrupt=after(looks).__next__,
            )
        )
        audit(session, model, [prompt + emitted(events)[0]])
    for taken in (1, 2, 4):
        running = generate(lm, [prompt], drafter, sampler(0.9, taken), Limits(20), pace=FixedPace(3), session=session)
        row = prompt + [token for _ in range(taken) for token in emitted([next(running)])[0]]
        running.close()  # type: ignore[attr-defined]
        audit(session, model, [row])


def test_an_error_inside_a_pass_leaves_a_usable_session(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    session = CausalLM(model).open([text(7, 10)])
    session.score([text(7, 10)], Draft.empty(1))
    network = session.network  # type: ignore[attr-defined]
    with monkeypatch.context() as broken:

        def fail(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        broken.setattr(network, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            session.score([[*text(7, 10), 3]], Draft.of([[4, 5]]))
    audit(session, model, [[*text(7, 10), 3]])


@pytest.mark.parametrize("name", SHAPES)
def test_a_fork_goes_its_own_way(name: str) -> None:
    model = model_of(name)
    lm, prompt = CausalLM(model), text(8, 20)
    base = lm.open([prompt])
    base.score([prompt], Draft.of([[3, 4, 5]]))  # a draft is pending when it is forked
    twin = base.fork()
    rows = [prompt + answers(lm, [prompt], drafters(model)["itself"], sampler(0.9, seed), length=9, session=session)[0]
            for seed, session in ((1, base), (2, twin))]  # fmt: skip
    audit(base, model, [rows[0]])
    audit(twin, model, [rows[1]])


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "drafting"), crossed(RAGGED, DRAFTING))
def test_ragged_rows_after_every_round(name: str, drafting: str) -> None:
    model = model_of(name)
    lm, prompts = CausalLM(model), [text(30, 3), text(31, 11), text(32, 6), text(33, 1)]
    session, rows, active = lm.open([list(p) for p in prompts]), [list(p) for p in prompts], [0, 1, 2, 3]
    seen = 0
    for event in generate(
        lm, prompts, drafters(model)[drafting], sampler(0.9), Limits(16, frozenset({2, 9, 17})), session=session
    ):
        for row, new in zip(rows, emitted([event], 4), strict=True):
            row.extend(new)
        if type(event).__name__ == "Finished":
            active.remove(event.row)
        if active and len(session.initial) == len(active) and not (seen := (seen + 1) % len(active)):
            audit_when_complete(session, model, [rows[row] for row in active])


def audit_when_complete(session: Session, model: Any, rows: Rows) -> None:
    """Between two Steps of one round some rows are a round behind: their text is short, not wrong."""
    assert all(length <= len(row) for length, row in zip(session.fork().rollback(rows), rows, strict=True))
    audit(session, model, rows)


@pytest.mark.parametrize("name", RAGGED)
def test_a_batch_says_what_its_rows_say_alone(name: str) -> None:
    model = model_of(name)
    lm, prompts = CausalLM(model), [text(40, 2), text(41, 13), text(42, 7), text(43, 1)]
    alone = [answers(lm, [prompt], None, greedy(), length=14, stop={4})[0] for prompt in prompts]
    for drafting in DRAFTING:
        for gamma in (1, 4, 7):
            found = answers(lm, prompts, drafters(model)[drafting], greedy(), length=14, gamma=gamma, stop={4})
            assert found == alone, (drafting, gamma)


@pytest.mark.parametrize("name", RAGGED)
def test_selecting_reorders_repeats_and_drops_rows(name: str) -> None:
    model = model_of(name)
    rows = [text(50, 5), text(51, 12), text(52, 8)]
    session = CausalLM(model).open([list(row) for row in rows])
    session.score(rows, Draft.empty(3))
    for order in ([2, 0, 1, 1], [3, 0], [1, 1, 0], [2]):
        session.select(torch.tensor(order))
        rows = [rows[place] + [place + 3] for place in order]
        audit(session, model, rows)
        session.score(rows, Draft.empty(len(rows)))


@pytest.mark.parametrize("name", RAGGED)
def test_absent_nodes_in_a_batch(name: str) -> None:
    """Rows with drafts of unequal depth, one with none: the present positions are right."""
    model = model_of(name)
    rows, drafted = [text(60, 4), text(61, 9), text(62, 6)], [[3, 4, 5], [6], []]
    session = CausalLM(model).open(rows)
    for row, chain, found in zip(rows, drafted, session.score(rows, Draft.of(drafted)), strict=True):
        for depth in range(len(chain) + 1):
            assert torch.allclose(found[depth], uncached(model, row + chain[:depth]), atol=CLOSE)
    session.commit([[0, 1], [0], []])
    assert session.rollback([rows[0] + [3, 4, 9], rows[1] + [6], rows[2] + [1]]) == [6, 10, 6]
    audit(session, model, [rows[0] + [3, 4, 9], rows[1] + [6, 2], rows[2] + [1]])


# -- what other models read -----------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("name", SHAPES)
def test_kv_is_what_the_model_itself_would_cache(name: str) -> None:
    model = model_of(name)
    row = text(70, 13)
    session = CausalLM(model).open([row])
    session.score([row[:8]], Draft.empty(1))
    session.score([row[:10]], Draft.of([[4, 5, 6]]))
    session.commit([[]])
    session.score([row], Draft.empty(1))
    past = transformers.DynamicCache()
    model(input_ids=torch.tensor([row]), past_key_values=past, use_cache=True)
    for layer in range(3):
        key, value, valid = session.kv(layer)
        assert valid.tolist() == [13]
        assert key.shape == value.shape == past.layers[layer].keys.shape
        assert torch.allclose(key, past.layers[layer].keys, atol=CLOSE)
        assert torch.allclose(value, past.layers[layer].values, atol=CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("name", SHAPES)
def test_hidden_states_of_committed_tokens(name: str) -> None:
    """They enter the head: its product with them gives the logits."""
    model = model_of(name)
    row = text(73, 6)
    session = CausalLM(model).open([row], hidden=True)
    session.score([row[:3]], Draft.empty(1))
    session.score([row], Draft.of([[3, 4, 5]]))
    session.commit([[0, 1]])
    states = session.hidden()
    expected = model(input_ids=torch.tensor([[*row, 3, 4]]), output_hidden_states=True).hidden_states[-1]
    assert states.shape == expected.shape == (1, 8, 32)
    assert torch.allclose(states, expected, atol=CLOSE)
    assert torch.allclose(session.fork().hidden(), expected, atol=CLOSE)
    session.rollback([row[:4]])
    assert torch.allclose(session.hidden(), expected[:, :4], atol=CLOSE)


def test_hidden_states_must_be_asked_for() -> None:
    refused(CausalLM(model_of("llama")).open([[3]]).hidden, kind=ValueError, match="hidden")


# -- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "named"), [([[]], "empty"), ([], "empty"), ([[V]], str(V)), ([[-1]], "-1")])
def test_prompts_that_cannot_be_read(prompt: Rows, named: str) -> None:
    refused(CausalLM(model_of("llama")).open, prompt, match=named)


def test_a_cut_vocabulary_cuts_the_logits() -> None:
    assert CausalLM(model_of("llama"), vocab_size=30).open([[3, 4]]).score([[3, 4]], Draft.empty(1)).shape == (1, 1, 30)


@pytest.mark.parametrize("name", ["mistral, window", "gemma2, window"])
def test_ragged_rows_of_a_windowed_model_are_right_or_refused(name: str) -> None:
    """Within the window they agree with the uncached model; beyond it one line says no, never a wrong answer."""
    model = model_of(name)
    rows = [text(80, 5), text(81, 12)]
    session = CausalLM(model).open(rows)
    session.score(rows, Draft.empty(2))
    audit(session, model, rows)
    refused(session.score, [text(80, 5) + text(82, 9), text(81, 12) + text(83, WINDOW)], Draft.empty(2), match="window")
    audit(session, model, rows)
