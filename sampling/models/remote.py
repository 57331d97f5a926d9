"""A target that runs in a server: each round's draft is scored by one request (in llama-cpp-python sometimes by more),
from the server's log-probabilities of the prompt. Greedy only; no caches.

vLLM and SGLang take and give ids. llama-cpp-python takes and gives text; a text that it splits into other tokens than
ours is refused. Logits are the server's log-probabilities where it gives them; the remaining probability is divided
evenly among the other ids. Knows no drafters.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sampling.types import LM, Draft, Hidden, Rows, Session
from utils.errors import ServerError, UsageError, UserError, raise_first
from utils.objects import HfTokenizer
from utils.remote.server import Server

_LEAST = 1e-9  # the least probability of all ids together that the server does not name
TOP = 5  # likeliest tokens requested at each position
SPAN = 4  # tokens of a continuation requested as text: a character has no more

# Log-probabilities by token, the likeliest first; besides the TOP likeliest it may have the drafted token.
Ranked = dict[int, float]


# Takes ids that end in a draft, and the draft's length; returns the server's likeliest tokens before the draft and
# after each of its tokens. UserError for a server that fails.
Score = Callable[[list[int], int], list[Ranked]]


class RemoteLM(LM):
    """A server's model; satisfies :class:`sampling.types.LM`.

    Args:
        scorer: asks the server; None where its token ids are not known, and nothing can be scored.
        vocab_size: the number of ids that may be emitted.
    """

    takes_trees = False

    def __init__(self, scorer: Score | None, vocab_size: int = 0, context: int = 1 << 30, name: str = "target") -> None:
        self.scorer, self.vocab_size, self.context, self.name = scorer, vocab_size, context, name

    def open(
        self, prompt: Rows, *, previous: Session | None = None, target: Session | None = None, hidden: Hidden = False
    ) -> "RemoteSession":
        """A session of one row; UserError for several, and for wanted hidden states."""
        if self.scorer is None:
            raise UserError(f"{self.name} answers in text: its tokens cannot be scored")
        raise_first(
            {
                f"{self.name} runs in a server: it has no hidden states for a drafter to read": hidden,
                f"{self.name} runs in a server: one prompt at a time, got {len(prompt)}": len(prompt) != 1,
            },
            UserError,
        )
        return RemoteSession(self.scorer, prompt, self.vocab_size, self.name)


class RemoteSession(Session):
    """One row; satisfies :class:`sampling.types.Session`. The server manages its own cache."""

    def __init__(self, scorer: Score, prompt: Rows, vocab_size: int, name: str) -> None:
        self._scorer, self.initial, self.vocab_size, self._name = scorer, prompt, vocab_size, name
        self.described = f"{name} runs in a server: it"

    takes_trees = False

    def rollback(self, rows: Rows) -> list[int]:
        """Count all tokens but each row's last as cached: nothing is read ahead, the first request reads the prompt."""
        return [len(row) - 1 for row in rows]

    def score(self, rows: Rows, draft: Draft) -> Tensor:
        """[1, N+1, V] by one call of the scorer."""
        drafted = draft.trees[0].tokens
        return torch.stack(list(map(self._logits, self._scorer([*rows[0], *drafted], len(drafted)))))[None]

    def _logits(self, named: Ranked) -> Tensor:
        known = {token: value for token, value in named.items() if 0 <= token < self.vocab_size}
        if not known:
            raise ServerError(f"{self._name} names no token of this vocabulary of {self.vocab_size}")
        left = max(_LEAST, 1 - sum(map(math.exp, known.values())))
        logits = torch.full((self.vocab_size,), math.log(left / max(1, self.vocab_size - len(known))))
        logits[list(known)] = torch.tensor(list(known.values()))
        return logits

    def select(self, rows: Tensor) -> None:
        return None  # there is one row

    def fork(self) -> "RemoteSession":
        return RemoteSession(self._scorer, self.initial, self.vocab_size, self._name)


# -- how each program scores a draft ------------------------------------------------------------------------


def scorer_of(server: Server, tokenizer: HfTokenizer, end_id: int) -> Score:
    """Return the function that scores drafts in this server; UsageError for one that gives no log-probabilities of a
    prompt's tokens."""
    makers: Mapping[str, Callable[[], Score]] = {
        "vLLM": lambda: partial(score_by_vllm, server),
        "SGLang": lambda: partial(score_by_sglang, server),
        "llama-cpp-python": lambda: EchoScorer(server, tokenizer, end_id).score,
    }
    if server.kind not in makers:
        raise UsageError(
            f"{server.address}{server.kind and f' ({server.kind})'} gives no log-probabilities of a prompt's tokens, "
            f"which drafts are verified by ({', '.join(makers)} do): without --pair and --tokenizer it answers itself"
        )
    return makers[server.kind]()


def ranked(logprobs: Mapping[int, float]) -> Ranked:
    """Return the log-probabilities by id, the likeliest first; of equal ones the lowest id."""
    return dict(sorted(logprobs.items(), key=lambda item: (-item[1], item[0])))


def score_by_vllm(server: Server, ids: list[int], drafts: int) -> list[Ranked]:
    """Score by `prompt_logprobs` of /v1/completions (vllm/entrypoints/openai/completion/protocol.py, 0.26)."""
    with server.reading():
        choice = server.post(
            "/completions",
            {
                **{"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": TOP},
                **({"prompt_logprobs": TOP} if drafts else {}),
                "return_tokens_as_token_ids": True,
            },
        )["choices"][0]
        positions = choice["prompt_logprobs"][-drafts:] if drafts else []
        scored = [{int(token): float(entry["logprob"]) for token, entry in position.items()} for position in positions]
        last = choice["logprobs"]["top_logprobs"][0].items()
        scored.append({int(token.removeprefix("token_id:")): float(value) for token, value in last})
    return [ranked(position) for position in scored]


def score_by_sglang(server: Server, ids: list[int], drafts: int) -> list[Ranked]:
    """Score by `input_top_logprobs` of /generate (docs/basic_usage/native_api,
    python/sglang/srt/managers/io_struct.py)."""
    with server.reading():
        meta = server.post(
            "//generate",
            {
                "input_ids": ids,
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": len(ids) - drafts - 1,  # the first token there has no log-probability
                "top_logprobs_num": TOP,
            },
        )["meta_info"]
        own, tops = (meta[name][-drafts:] if drafts else [] for name in ("input_token_logprobs", "input_top_logprobs"))
        positions = [(*top, drafted) for top, drafted in zip(tops, own, strict=True)] + [meta["output_top_logprobs"][0]]
        scored = [{int(token): float(value) for value, token, *_ in position} for position in positions]
    return [ranked(position) for position in scored]


class EchoScorer:
    """Scores by `echo` and `logprobs` of llama-cpp-python's /v1/completions (llama_cpp/llama.py, 0.3.36;
    `--logits_all`).

    Tokens are known by their texts. A text that several tokens share, such as that of part of a character or of a
    special token, names none: where the likeliest token may be one of those, the server is made to continue the text.
    The same is done where the tokenizer splits the text of the ids into other ids (a target may emit two line ends
    where its tokenizer has a token for both).
    """

    def __init__(self, server: Server, tokenizer: HfTokenizer, end_id: int) -> None:
        self._server, self._tokenizer, self._end_id = server, tokenizer, end_id
        self._begin_id: int | None = getattr(tokenizer, "bos_token_id", None)
        self._adds_begin = False  # whether the server puts that token before a text
        texts = [self._text([token]).replace("\ufffd", "") for token in range(max(tokenizer.get_vocab().values()) + 1)]
        count = Counter([*texts, ""])
        self._ids = {text: token for token, text in enumerate(texts) if text and count[text] == 1}
        self._known: list[int] = []  # ids, and the server's continuation after the first `_begins` of them
        self._values: list[float] = []  # … and the log-probabilities of these tokens
        self._begins = 0

    def score(self, ids: list[int], drafts: int) -> list[Ranked]:
        begin = len(ids) - drafts
        sent = next((end for end in range(len(ids), begin - 1, -1) if self._same(ids[:end])), 0)
        scored = self._echoed(ids[:sent]) if sent else {}
        positions: list[Ranked] = []
        refused = False  # drafts after a rejected one are not examined
        for end in range(begin, len(ids) + 1):
            named, certain = scored.get(end - 1, ({}, False))
            if not certain and not refused:
                token, value = self._next(ids[:end])
                value = math.log(max(_unnamed(named), _LEAST)) if value is None else value
                named = {token: value} | {other: less for other, less in named.items() if other != token}
            positions.append(named or positions[-1])
            refused |= end < len(ids) and next(iter(positions[-1])) != ids[end]
        return positions

    def _echoed(self, ids: list[int]) -> dict[int, tuple[Ranked, bool]]:
        """Return, by the position of an id, the tokens named after it, and whether the likeliest of all is among them.

        The server's list leaves out all begin-of-text tokens. The entry at index i of the text without a leading one
        has the log-probabilities computed at index i of the whole text, those of the token after it.
        """
        answer = self._complete(ids, echo=True, logprobs=TOP, max_tokens=1)
        with self._server.reading():
            count, choice = answer["usage"]["prompt_tokens"], answer["choices"][0]
            if count == len(ids) + 1 and ids[0] == self._begin_id and not self._adds_begin:
                self._adds_begin = True
                return self._echoed(ids)
            if count != len(ids):
                raise ServerError(
                    f"{self._server.address} reads the text as {count} tokens, this tokenizer as {len(ids)}"
                )
            listed = ids[1:] if ids[0] == self._begin_id else ids
            positions = [position for position, token in enumerate(listed) if token != self._begin_id]
            if len(listed) < len(ids) and choice["finish_reason"] == "length":
                positions.append(len(listed))  # the new token's
            entries = choice["logprobs"]["top_logprobs"]
            return {position: self._named(entry) for position, entry in zip(positions, entries, strict=True) if entry}

    def _named(self, texts: Mapping[str, float]) -> tuple[Ranked, bool]:
        named = ranked({self._ids[text]: float(value) for text, value in texts.items() if text in self._ids})
        # whether the first is the likeliest of all: no unnamed token can have more
        first = math.exp(next(iter(named.values()), -math.inf)) > _unnamed(named)
        return named, first or len(named) == len(texts)

    def _next(self, ids: list[int]) -> tuple[int, float | None]:
        """Return the token that the server gives after these ids, and its log-probability if known.

        If the tokenizer splits their text into other ids, the server continues from the last position up to which it
        does not, and must emit the same tokens. UserError if it emits others.
        """
        if self._begins > len(ids) or self._known[: len(ids)] != ids or len(self._known) <= len(ids):
            self._go_on(next((end for end in range(len(ids), 0, -1) if self._same(ids[:end])), 0), ids)
        position = len(ids) - self._begins
        return self._known[len(ids)], self._values[position] if position < len(self._values) else None

    def _go_on(self, begins: int, ids: list[int]) -> None:
        """Request the tokens after ids[:begins], up to some that follow `ids`."""
        answer = self._complete(ids[:begins], logprobs=0, max_tokens=len(ids) - begins + SPAN)
        with self._server.reading():
            choice = answer["choices"][0]
            texts, ended = choice["logprobs"]["tokens"], choice["finish_reason"] == "stop"
            self._values = list(map(float, choice["logprobs"]["token_logprobs"]))
            more = [self._ids.get(text, -1) for text in texts]
            if -1 in more:  # part of a character: the text as a whole has it
                whole = self._encoded(self._text(ids[:begins]) + choice["text"])
                more = whole[begins : begins + len(texts)] if whole[:begins] == ids[:begins] else []
        self._begins, self._known = begins, [*ids[:begins], *more, *([self._end_id] if ended else [])]
        if self._known[: len(ids)] != ids or len(self._known) <= len(ids):
            raise ServerError(f"{self._server.address} takes text, and that of this answer reads in other tokens")

    def _complete(self, ids: list[int], **more: Any) -> Any:
        text = self._text(ids[1:] if self._adds_begin and ids[0] == self._begin_id else ids)
        return self._server.post("/completions", {"prompt": text, "temperature": 0, "repeat_penalty": 1.0, **more})

    def _same(self, ids: list[int]) -> bool:
        """Return whether these ids are those of their text."""
        return self._encoded(self._text(ids)) == ids

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _unnamed(named: Ranked) -> float:
    """Return the probability of all other tokens together."""
    return 1 - sum(map(math.exp, named.values()))
