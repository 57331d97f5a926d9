"""Self-writing: what a chat says is its own, whatever stands beside it; its file survives kills and full disks."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from sampling.drafters.draft_model import NoDrafter
from sampling.events import Step
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.models.fused import FusedNetwork
from sampling.models.network import TransformersNetwork, network_of
from sampling.types import Limits
from tests.support.quantized import quantized_model
from tests.support.refusals import refused
from tests.support.runs import greedy
from tests.support.tiny import tiny_model, tiny_tokenizer
from training.text.dialogues import Ask, Chat, GivenPrompts, OwnChats
from training.text.synthesize import TextWriter, draw, passages, write_self, written
from utils.kernels.quantized_linear import pack

STOP = frozenset([2])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def own(model: Any, tokenizer: Any, batch: int = 8, seed: int = 3) -> TextWriter:
    return TextWriter(CausalLM(model), STOP, OwnChats(tokenizer, STOP, 24), seed, batch)


def given(model: Any, tokenizer: Any, batch: int = 4, **more: Any) -> TextWriter:
    return TextWriter(
        CausalLM(model),
        STOP,
        GivenPrompts(tokenizer, [["hello there"], ["one", "two and three"], ["a"]], 12, **more),
        3,
        batch,
    )


def first(writer: TextWriter, count: int, done: Any = ()) -> dict[int, Any]:
    return dict(islice(writer.chats(done), count))


def test_a_chat_does_not_depend_on_its_neighbours_or_on_where_the_run_began(model: Any, tokenizer: Any) -> None:
    alone = first(own(model, tokenizer, batch=1), 10)
    together = first(own(model, tokenizer, batch=8), 24)
    later = first(own(model, tokenizer, batch=5), 14, done=set(range(7)))
    assert set(alone) == set(range(10))
    assert sum(bool(lines) for lines in together.values()) >= 3
    assert all(together[number] == lines for number, lines in alone.items() if number in together)
    assert all(together[number] == lines for number, lines in later.items() if number in together)
    assert not set(later) & set(range(7))
    other = first(own(model, tokenizer, batch=8, seed=4), 24)
    assert any(other[number] != lines for number, lines in together.items() if number in other)


def test_a_compiled_pass_writes_whatever_stands_beside_it_bit_for_bit(tokenizer: Any) -> None:
    model = quantized_model("llama, three queries a key")
    assert isinstance(network_of(model), FusedNetwork)
    alone, together = first(own(model, tokenizer, batch=1), 6), first(own(model, tokenizer, batch=7), 12)
    assert sum(bool(lines) for lines in alone.values()) >= 2
    assert all(together[number] == lines for number, lines in alone.items() if number in together)


def test_greedy_answers_are_those_of_the_decode_loop(model: Any, tokenizer: Any) -> None:
    lines = [line for lines in dict(given(model, tokenizer, temperatures=(0.0,)).chats()).values() for line in lines]
    assert len(lines) == 4  # one of the prompts has two turns
    for line in lines:
        events = generate(CausalLM(model), [line["ids"][: line["start"]]], NoDrafter(), greedy(), Limits(12, STOP))
        assert line["ids"][line["start"] :] == [
            token for event in events if isinstance(event, Step) for token in event.emitted
        ]


@pytest.mark.parametrize("how", ["transformers", "packed", "bfloat16"])
def test_any_network_writes(model: Any, tokenizer: Any, how: str) -> None:
    if how == "transformers":
        assert dict(given(TransformersNetwork(model), tokenizer).chats()) == dict(given(model, tokenizer).chats())
        return
    twin = tiny_model()
    if how == "packed":
        pack(twin)
        assert dict(given(twin, tokenizer).chats()) == dict(given(model, tokenizer).chats())
        return
    half: Any = twin.to(dtype=torch.bfloat16)
    assert all(lines for lines in dict(given(half, tokenizer).chats()).values())


def test_every_prompt_is_answered_at_every_temperature(model: Any, tokenizer: Any) -> None:
    chats = dict(given(model, tokenizer, temperatures=(0.0, 0.7)).chats())
    assert sorted(chats) == list(range(6))
    assert [line["temperature"] for number in range(6) for line in chats[number]] == [0.0] * 4 + [0.7] * 4
    one, two = chats[1]
    text = tokenizer.decode(two["ids"][: two["start"]])
    assert "two and three" in text
    assert tokenizer.decode(one["ids"][one["start"] :], skip_special_tokens=True).strip() in text
    assert all(line["number"] == number for number, lines in chats.items() for line in lines)


def test_a_prompt_without_room_for_an_answer_is_left_out(model: Any, tokenizer: Any) -> None:
    chats = dict(given(model, tokenizer, temperatures=(0.0,), most=60).chats())
    assert [len(chats[number]) for number in range(3)] == [1, 1, 1]  # the second turn of the second has no room
    assert all(len(line["ids"]) <= 60 for lines in chats.values() for line in lines)
    assert dict(given(model, tokenizer, temperatures=(0.0,), most=5).chats()) == {0: [], 1: [], 2: []}


def test_draws_follow_their_law_and_never_meet_probability_0() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(20_000, -1)
    law = torch.tensor([0.0, 1.0, -torch.inf, 2.0]).div(0.7).softmax(dim=-1)
    drawn = torch.tensor(draw(logits, [0.7] * 20_000, list(range(20_000))))
    seen = torch.bincount(drawn, minlength=4) / 20_000
    assert seen[2] == 0
    assert (seen - law).abs().max() < 0.015
    assert draw(logits[:3], [0.0, 0.0, 0.0], [1, 2, 3]) == [3, 3, 3]


def test_an_interrupt_ends_at_the_next_token(model: Any, tokenizer: Any) -> None:
    calls = iter([False] * 20 + [True] * 100)
    list(own(model, tokenizer).chats((), lambda: next(calls)))
    assert len(list(calls)) == 99


def test_user_turns_that_never_end_are_told(tokenizer: Any) -> None:
    class Endless:
        longest, endless = 40, True

        def chat(self, number: int) -> Chat:
            yield Ask([5, 6], 1.0, 1)
            return []

    refused(list, TextWriter(CausalLM(tiny_model()), STOP, Endless()).chats(), match="user turns do not end")


def test_a_tokenizer_without_a_template_cannot_write_to_itself() -> None:
    refused(OwnChats, tiny_tokenizer(chat=False), STOP, match="has no chat template")
    chats = dict(given(tiny_model(), tiny_tokenizer(chat=False), temperatures=(0.0,)).chats())
    assert [len(lines) for lines in chats.values()] == [1, 1, 1]  # the text itself is continued


# -- the file -------------------------------------------------------------------------------------


def by_number(file: Path) -> dict[int, Any]:
    return {row["number"]: row for row in map(json.loads, file.read_text().splitlines())}


def test_a_file_killed_while_it_was_written_goes_on(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    file, whole = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    told: list[int] = []
    write_self(own(model, tokenizer), whole, 120, told.append)
    first_half = write_self(own(model, tokenizer), file, 50, told.append)
    kept = file.read_bytes()
    file.write_bytes(kept + b'{"ids": [1,')
    assert written(file)[0] == first_half
    assert file.read_bytes() == kept  # the cut line is gone
    count = write_self(own(model, tokenizer), file, 120, told.append)
    assert file.read_bytes().startswith(kept)
    numbers = [json.loads(line)["number"] for line in file.read_text().splitlines()]
    assert len(set(numbers)) == len(numbers)  # nothing twice, also of what came to nothing
    again, before = by_number(file), by_number(whole)
    assert all(again[number] == before[number] for number in set(again) & set(before))
    assert count == sum(len(one.ids) - one.start for one in passages(file)) >= 120


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"ids": [1], "start": 0}\n')
    refused(written, file, match="is no file of self-written text")
