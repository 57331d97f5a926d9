"""Servers that give log-probabilities of a prompt's tokens, over a target made up of a few words, in the formats of
three engines as their sources have them. The target says one text over and over, whatever it was asked.
"""

import math
from typing import Any

from tests.support.scripted_server import Reply, ScriptedServer, said
from tests.support.tiny import END, tiny_tokenizer

SAYING = " to be in the tion of 😀 and is to be in the ing of 😀 and is"
OTHERS = (" the", " of", "x")  # tokens that are next likeliest everywhere


class Sayer:
    """Log-probabilities behind any ids: those of `SAYING`, followed by its last three ids; then the end."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        self.end = self.tokenizer.convert_tokens_to_ids(END)
        self.ids = self.encoded(SAYING)
        self.others = [self.encoded(text)[0] for text in OTHERS]

    def encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def next(self, ids: list[int]) -> int:
        """The likeliest token: the saying's, as far as it was said behind the last line end."""
        begin = max((at for at, token in enumerate(ids) if token == self.encoded("\n")[0]), default=-1) + 1
        done = ids[begin:]
        return self.ids[len(done)] if len(done) < len(self.ids) else self.end

    def logprobs(self, ids: list[int], count: int) -> dict[int, float]:
        """The `count` likeliest tokens behind these ids."""
        best = self.next(ids)
        others = [token for token in self.others if token != best]
        chances = {best: 0.6, **{token: 0.2 / 2**at for at, token in enumerate(others)}}
        return {token: math.log(chances[token]) for token in list(chances)[:count]}

    def answer(self, ids: list[int], count: int) -> list[int]:
        """Greedy decoding, a closing end included."""
        more: list[int] = []
        while len(more) < count and self.end not in more:
            more.append(self.next([*ids, *more]))
        return more

    def chat(self, reply: Reply, body: dict[str, Any]) -> None:
        prompt = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        ids = self.answer(self.encoded(prompt), body["max_tokens"])
        text = self.text([token for token in ids if token != self.end])
        reply.events(said(text, finish="stop" if self.end in ids else "length", tokens=len(ids)))


def vllm(sayer: Sayer) -> ScriptedServer:
    """vllm/entrypoints/openai/completion/protocol.py: `prompt_logprobs` is a list with a place for each token of the
    prompt, None for the first; `return_tokens_as_token_ids` names tokens in `logprobs`."""

    def complete(reply: Reply, body: dict[str, Any]) -> None:
        ids, count = body["prompt"], body.get("prompt_logprobs")
        places: list[Any] = [None]
        for at in range(1, len(ids)):
            known = sayer.logprobs(ids[:at], count or 0)
            known = {ids[at]: known.get(ids[at], -9.0), **known}  # the prompt's own token is always there
            places.append(
                {str(token): {"logprob": value, "rank": 1, "decoded_token": "?"} for token, value in known.items()}
            )
        tops = {f"token_id:{token}": value for token, value in sayer.logprobs(ids, body["logprobs"]).items()}
        choice = {"index": 0, "text": "?", "logprobs": {"tokens": [next(iter(tops))], "top_logprobs": [tops]}}
        reply.json({"choices": [{**choice, "prompt_logprobs": None if count is None else places}]})

    return ScriptedServer(sayer.chat, owner="vllm", v1__completions=complete)


def sglang(sayer: Sayer) -> ScriptedServer:
    """python/sglang/srt/managers: entries are [log-probability, id, text]; those of the prompt begin at
    `logprob_start_len`, and the first of them is empty."""

    def generate(reply: Reply, body: dict[str, Any]) -> None:
        ids, start, count = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        own, tops = [[None, ids[start], None]], [None]
        for at in range(start + 1, len(ids)):
            known = sayer.logprobs(ids[:at], count)
            own.append([known.get(ids[at], -9.0), ids[at], None])
            tops.append([[value, token, None] for token, value in known.items()])  # type: ignore[arg-type]
        last = [[value, token, None] for token, value in sayer.logprobs(ids, count).items()]
        meta = {"input_token_logprobs": own, "input_top_logprobs": tops, "output_top_logprobs": [last]}
        reply.json({"text": "?", "meta_info": meta})

    return ScriptedServer(sayer.chat, owner="sglang", generate=generate)


def llama_cpp_python(sayer: Sayer, begin: int | None = None) -> ScriptedServer:
    """llama_cpp/llama.py, `_create_completion`: `begin` is the token that begins texts, which is left out of `tokens`;
    entries of `top_logprobs` are what follows the token at the same place of the whole prompt, by text."""

    def shown(ids: list[int]) -> str:
        return "" if ids[0] == sayer.end or ids[0] == begin else sayer.text(ids).replace("\ufffd", "")

    def complete(reply: Reply, body: dict[str, Any]) -> None:
        ids = sayer.encoded(body["prompt"])
        more = sayer.answer(ids, body["max_tokens"])
        ended = sayer.end in more
        more = [token for token in more if token != sayer.end]
        logprobs = None
        if body.get("logprobs") is not None:
            echo = bool(body.get("echo"))
            listed = [*(ids[1:] if ids[0] == begin else ids), *more] if echo else more
            first, whole = 0 if echo else len(ids) - 1, [*ids, *more]
            scores = [sayer.logprobs(whole[: at + 1], 99) for at in range(first, len(whole) - bool(more))]
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
            for token, score in zip(listed, scores, strict=False):
                if token == begin:
                    continue
                tops = {shown([other]): value for other, value in list(score.items())[: body["logprobs"]]}
                logprobs["tokens"].append(shown([token]))
                logprobs["token_logprobs"].append(score.get(token, -9.0))
                logprobs["top_logprobs"].append({**tops, shown([token]): score.get(token, -9.0)})
            if echo:
                logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        text = sayer.text(more) if more else ""
        choice = {"text": text.replace("\ufffd", ""), "index": 0, "logprobs": logprobs}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(more)}
        reply.json({"choices": [{**choice, "finish_reason": "stop" if ended else "length"}], "usage": usage})

    return ScriptedServer(sayer.chat, owner="me", v1__completions=complete)
