"""Asks a server for chat answers, piece by piece with its own figures, in OpenAI's protocol or Ollama's.

OpenAI's official client sends the requests of every protocol and is imported with the first request. Every
failure of a server is a UserError of one line. Knows no lanes and no screen.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from utils.errors import ServerError, UsageError, UserError, is_count, raise_first, shown
from utils.objects import Json, nested
from utils.progress import Cancelled
from utils.remote.pieces import ServerFigures

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from utils.logits_processors import Bias

OWN = "server"  # the lane of the pair's own server; other servers' lanes have their URLs for names
_LOOK = 0.05  # seconds between two looks at the interrupt
BAN = -100.0  # a bias that makes a token impossible
SENT = ("temperature", "top_p", "seed")  # settings that every protocol has a field of the same name for
PENALTIES = ("presence_penalty", "frequency_penalty")

Result = TypeVar("Result")
ServerMessage = Mapping[str, str]


def is_server(lane: str) -> bool:
    """Return whether a lane of this name is a server's answer."""
    return lane == OWN or is_url(lane)


def is_url(text: str) -> bool:
    """Return whether a model's name is a server's address."""
    return text.startswith(("http://", "https://"))


def address_of(url: str) -> str:
    """HOST:PORT of a server's URL."""
    return re.sub(r"^\w+://|[/#].*$", "", url)


@dataclass(frozen=True)
class Server(ABC):
    """A server by its URL. A protocol is a subclass with the class variables, the abstract methods and, if need be,
    `data`.

    Args:
        model: the name it knows the model by; None: its only one. A URL may end in #MODEL too.
        key_env: the environment variable that holds its key.
        silence: seconds without a byte after which it is given up.
    """

    url: str
    model: str | None = None
    key_env: str | None = None
    silence: float = 300.0  # a large model may be loading

    protocol: ClassVar[str]  # its name in errors
    chat_at: ClassVar[str]  # path of the request for an answer
    models_at: ClassVar[tuple[str, str, str]]  # the path of the list of models, its field, and the field of a name
    between: ClassVar[bytes]  # the parts of a stream: a regular expression

    @abstractmethod
    def options(self, settings: Any, bias: Bias = MappingProxyType({})) -> Json:
        """Return the settings and the bias of ids as fields of a request. UsageError for one that has none."""

    @abstractmethod
    def pieces(self, part: Json, answer: ChatAnswer) -> Iterator[tuple[str, float | None]]:
        """Yield the pieces of text in a part of a stream, each with its log-probability if known, and set `logprobs`,
        `report` and `ended` of the answer from it. ValueError for a part that breaks the protocol."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The server program, which decides how drafts are scored (sampling/models/remote.py). "": unknown."""

    def data(self, part: bytes) -> bytes:
        """Return the JSON object in a part of a stream, which has `done` in the last one; empty where it has none."""
        return part

    def counting(
        self, answer: ChatAnswer, runner: asyncio.Runner, client: AsyncOpenAI
    ) -> AbstractContextManager[object]:
        """Count what the server does during an answer, where it has counters."""
        return nullcontext()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return address_of(self.url)

    @property
    def name(self) -> str:
        """The model's name, or the address where none is given."""
        return self.model or self.url.partition("#")[2] or self.address

    @cached_property
    def arguments(self) -> Json:
        """The arguments of the official client. UsageError where the key is not there."""
        if not (key := os.environ.get(self.key_env, "") if self.key_env else "none"):
            raise UsageError(f"{self.address} needs a key in the environment variable {self.key_env}, which is not set")
        return {
            "base_url": self.url.partition("#")[0].rstrip("/"),
            "api_key": key,
            "max_retries": 0,
            "timeout": self.silence,
        }

    @cached_property
    def _client(self) -> Any:
        from openai import OpenAI

        return OpenAI(**self.arguments)

    @cached_property
    def models(self) -> list[Mapping[str, object]]:
        """The models that the server lists; none where it has no list (`transformers serve` answers 500 where the hub's
        cache is not there). UserError if no server answers, or one refuses; Cancelled at Ctrl-C."""
        from openai import InternalServerError, NotFoundError

        path, models, name = self.models_at
        with self.waiting(), suppress(NotFoundError, InternalServerError):
            listed = self._client.get(path, cast_to=object)
            return [model for model in field_of(listed, models, list) or [] if field_of(model, name, str)]
        return []

    @property
    def context(self) -> int | None:
        """The most tokens that a text may have, where the server says so (vLLM does)."""
        return next(filter(None, (count_of(model, "max_model_len") for model in self.models)), None)

    @property
    def chosen(self) -> str | None:
        """The model to ask for; None where the server names none. UsageError for several, UserError for no server."""
        if given := self.model or self.url.partition("#")[2]:
            return given
        names = [str(model[self.models_at[2]]) for model in self.models]
        if len(names) > 1:
            raise UsageError(
                f"{self.address} has several models: --model names one of "
                f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
            )
        return names[0] if names else None

    def stream(
        self,
        messages: Sequence[ServerMessage],
        settings: Any,
        bias: Bias,
        interrupt: Callable[[], bool],
        top_logprobs: int | None = None,
    ) -> ChatAnswer:
        """Return the answer to a chat, with `top_logprobs` log-probabilities for each token (None: without any).
        UsageError as :meth:`options`."""
        wanted = {} if top_logprobs is None else {"logprobs": True, "top_logprobs": top_logprobs}
        return ChatAnswer(self, messages, {**self.options(settings, bias), **wanted}, interrupt)

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """Return the JSON that comes back for a body of JSON; a path with two slashes begins at the server's root.
        UserError where the server fails, Cancelled at Ctrl-C."""
        path = self.arguments["base_url"].removesuffix("/v1") + path[1:] if path.startswith("//") else path
        named = {} if self.chosen is None else {"model": self.chosen}
        with self.waiting():
            answer: Json = self._client.post(path, body={**named, **body}, cast_to=object)
            field_of(answer, "error", object)  # refuses a web page
            return answer

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn every failure of the server into a UserError of one line."""
        try:
            yield
        except Exception as error:
            if problem := problem_of(error, self):
                raise ServerError(problem) from error
            raise

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """As `reading`, and Ctrl-C ends the wait with Cancelled, also where its handler only sets a flag."""
        with self.reading(), ExitStack() as stack:
            with suppress(ValueError):  # no signals outside the main thread
                stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
            try:
                yield
            except KeyboardInterrupt:
                stack.close()
                signal.raise_signal(signal.SIGINT)  # for that handler
                raise Cancelled(f"stopped waiting for {self.address}") from None


def problem_of(error: BaseException, server: Server) -> str:
    """Return the line for a failure of a server; "" for an error that the server did not cause."""
    import openai

    at = server.address
    # While a stream is read, errors come from the HTTP library below the client, whose module has had two names.
    broke = error if type(error).__module__.startswith("httpx") else None
    if isinstance(error, openai.APITimeoutError) or "Timeout" in type(broke).__name__:
        return f"{at} sent nothing for {server.silence:g} s"
    if broke or isinstance(error, openai.APIConnectionError):
        why, kind = _line(error.__cause__ or error), type(error.__cause__).__name__.lower()
        if isinstance(error.__cause__, OSError) or "connect" in kind:
            return f"no server answers at {at} ({why})"
        return f"{at} {'redirects without end' if 'redirect' in kind else 'closed the connection'} ({why})"
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        where = f"the key in {server.key_env}" if server.key_env else "a request without a key (key_env in models.yaml)"
        return f"{at} refuses {where}: {said_by(error.body or error)}"
    if isinstance(error, openai.APIStatusError):
        return f"{at} answers {error.status_code}: {said_by(error.body or error)}"
    if isinstance(error, openai.OpenAIError | ValueError | TypeError | AttributeError | LookupError | RecursionError):
        return f"{at} sends no answer in {server.protocol}'s protocol ({_line(error)})"
    return ""


def said_by(body: object) -> str:
    """Return the server's own words for an error."""
    for key in ("error", "message", "detail"):
        body = body.get(key) or body if isinstance(body, Mapping) else body
    return _line(body)


_PAGE = "a web page in place of an API: a URL ends in /v1, that of Ollama's own protocol in /api"


def _line(error: object) -> str:
    """Return at most 200 characters on one line; `_PAGE` for HTML and XML, which begin with < as no JSON does."""
    text = " ".join(str(error).split())
    return _PAGE if text.startswith("<") else (text or type(error).__name__)[:200]


@dataclass
class ChatAnswer:
    """A server's answer to a chat: iterates over (text, seconds since the piece before, or since the request).

    Text that is sent apart, such as reasoning, counts as a piece without text. `logprobs` are the entries of its
    tokens, if they were wanted, `log_prob` that of the latest piece, None where the server gives none. `reason` and
    `report` hold when it is over. UserError where the server fails before the first piece; later `report.problem` says
    why it ends.

    Args:
        options: the fields of the request beside the model and the messages.
    """

    server: Server
    messages: Sequence[ServerMessage]
    options: Mapping[str, object]
    interrupt: Callable[[], bool]
    reason: Literal["eos", "length", "interrupted"] = "interrupted"
    logprobs: list[Json] = field(default_factory=list)
    report: ServerFigures = field(default_factory=ServerFigures)
    log_prob: float | None = None
    ended: str = ""  # the server's word for why it ended
    begun: bool = False

    def __iter__(self) -> Iterator[tuple[str, float]]:
        from openai import AsyncOpenAI

        named = {} if self.server.chosen is None else {"model": self.server.chosen}
        client, request = AsyncOpenAI(**self.server.arguments), {**named, "messages": list(self.messages)}
        try:
            with self.server.reading(), asyncio.Runner() as runner, self.server.counting(self, runner, client):
                last = time.monotonic()
                for text in self._texts(runner, client, {**request, **self.options, "stream": True}):
                    before, last = last, time.monotonic()
                    yield text, last - before
        except UserError as error:
            if not self.begun:
                raise
            self.report = self.report._replace(problem=str(error))

    def _texts(self, runner: asyncio.Runner, client: AsyncOpenAI, request: Json) -> Iterator[str]:
        """Yield the pieces as they come."""
        received = asyncio.Queue[Any]()
        reading = runner.get_loop().create_task(self._read(client, request, received))
        while (part := self.wait(runner, received.get())) is not None:
            if error := field_of(part, "error", object):
                raise UserError(f"{self.server.address} broke off: {said_by(error)}")
            for text, log_prob in self.server.pieces(part, self):
                self.begun, self.log_prob = True, log_prob
                yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins pairs of surrogates
        if reading.done():
            reading.result()
        if not self.ended and self.interrupt():
            return
        if not self.ended:
            raise UserError(f"{self.server.address} closed the connection before the answer's end")
        self.reason = "length" if self.ended == "length" else "eos"
        if self.ended not in ("length", "stop"):
            self.report = self.report._replace(problem=f"{self.server.address} ended it: {_line(self.ended)}")

    async def _read(self, client: AsyncOpenAI, request: Json, received: asyncio.Queue[Any]) -> None:
        """Put a stream's parts into the queue, and None after them. One task reads them all: a stream that no task is
        reading cannot be closed in order."""
        from openai import AsyncStream

        try:
            async with await client.post(
                self.server.chat_at, cast_to=object, body=request, stream=True, stream_cls=AsyncStream[object]
            ) as stream:
                async for part in _split(stream.response.aiter_bytes(), self.server.between):
                    raise_first({_PAGE: part.lstrip().startswith(b"<")}, ValueError)
                    record = (
                        json.loads(
                            self.server.data(part).decode().strip() or "{}",
                            parse_constant=lambda word: raise_first({f"{word} is no JSON": True}, ValueError),
                        )
                        or {}
                    )
                    received.put_nowait(record)
                    if isinstance(record, dict) and record.get("done"):
                        break
        finally:
            received.put_nowait(None)

    def wait(self, runner: asyncio.Runner, work: Awaitable[Result]) -> Result | None:
        """Return the result of some work, or None as soon as the answer is interrupted."""

        async def watched() -> Result | None:
            task = asyncio.ensure_future(work)
            while not task.done():
                if self.interrupt():
                    task.cancel()
                    return None
                await asyncio.wait({task}, timeout=_LOOK)
            return task.result()

        return runner.run(watched())


async def _split(stream: AsyncIterator[bytes], between: bytes) -> AsyncIterator[bytes]:
    """Yield the parts of a stream, the last of which may lack its end."""
    rest = b""
    async for received in stream:
        *parts, rest = re.split(between, rest + received)
        for part in parts:
            yield part
    yield rest


def token_pieces(text: str, entries: Sequence[Json]) -> list[tuple[str, float | None]]:
    """Return a text's tokens with their log-probabilities, by the entries of its tokens: the text as one piece where
    they do not spell it, as where a character has several tokens. ValueError for a log-probability that is none."""
    tokens = [(str(each["token"]), float(each["logprob"])) for each in entries]
    raise_first({f"logprob is {value}": not -math.inf < value < 1 for _, value in tokens}, ValueError)
    spelled = bool(tokens) and "".join(token for token, _ in tokens) == text
    return [*tokens] if spelled else [(text, sum(value for _, value in tokens) if tokens else None)]


def count_of(record: object, name: str) -> int | None:
    """Return the count `name` in part of an answer; None if there is none, or a value that is no count."""
    value = record.get(name) if isinstance(record, Mapping) else None
    return value if is_count(value) else None


def field_of(record: object, name: str, kind: type[Result]) -> Result | None:
    """Return a field of part of an answer; None where it, or that part, is missing or null. ValueError for a value of
    another type."""
    if record is not None and not isinstance(record, Mapping):
        raise ValueError(_PAGE if str(record).lstrip().startswith("<") else f"{shown(record)} in place of an object")
    value = None if record is None else record.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} is {shown(value)}")
    return value


# -- OpenAI's protocol, with what engines add to it -------------------------------------------------------

_COUNTERS = {  # what is counted → the counter in /metrics: vLLM's, then SGLang's, which counts no drafts
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "passes": "vllm:spec_decode_num_drafts_total",
    "verified": "sglang:spec_verify_calls_total",
}
_DRAFTS = {  # by their path in a chunk: an engine's own counts of an answer's drafts, accepted ones and passes
    "timings": ("draft_n", "draft_n_accepted", ""),  # llama-server: tools/server/README.md
    "metrics.speculative_decoding": ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps"),  # vLLM 0.32:
    # docs/features/speculative_decoding/acceptance_metrics.md; SGLang answers `return_spec_tokens_details` (its #33518)
    "sglext.spec_tokens_details": ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct"),
    "stats": ("total_draft_tokens_count", "accepted_draft_tokens_count", ""),  # LM Studio 0.3.10, release notes …
    "usage": ("total_draft_tokens_count", "accepted_draft_tokens_count", ""),  # … or here
}
_RATES = {"timings": "predicted_per_second", "metrics": "tokens_per_second", "stats": "tokens_per_second"}
_KINDS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama-server", "me": "llama-cpp-python"}

# Settings for which the protocol has no field but some engines do, each with the value that switches it off:
FURTHER = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Engines that take those fields, and the value of `top_k` that allows every token: a field that is left out has the
# engine's own default.
ALL = {"vLLM": -1, "SGLang": -1, "llama-server": 0, "llama-cpp-python": 0}


# (program, form) → the field of a request (engines' "Structured Outputs"; llama.cpp's tools/server/README.md)
FORM_FIELDS = {
    **dict.fromkeys((("vLLM", "grammar"), ("vLLM", "regex")), "structured_outputs"),
    **{("SGLang", "grammar"): "ebnf", ("SGLang", "regex"): "regex"},
    **dict.fromkeys((("llama-server", "grammar"), ("llama-cpp-python", "grammar")), "grammar"),
}


class OpenAIServer(Server):
    """A server that speaks OpenAI's protocol, by its URL, which ends in /v1."""

    protocol = "OpenAI"
    chat_at = "/chat/completions"
    models_at = ("/models", "data", "id")
    between = rb"\r?\n\r?\n"

    @property
    def kind(self) -> str:
        """Which program it is, by the owner that it names for its models; "" where that says nothing."""
        return next((_KINDS.get(str(model.get("owned_by")), "") for model in self.models), "")

    def options(self, settings: Any, bias: Bias = MappingProxyType({})) -> Json:
        """Return settings and bias, with fields that its engine alone has; UsageError as :meth:`Server.options`."""
        optional = {
            **{name: getattr(settings, name) for name in PENALTIES},
            "stop": list(settings.stop),
            "logit_bias": {str(token): max(BAN, amount) for (token,), amount in bias.items()},
        }
        options = {
            **{name: getattr(settings, name) for name in SENT},
            **{"max_tokens": settings.max_new_tokens, "stream_options": {"include_usage": True}},
            **{name: value for name, value in optional.items() if value},
            **form_for(self, settings),
        }
        further = {name: getattr(settings, name) for name in FURTHER}
        if self.kind in ALL:
            options |= {**further, "top_k": settings.top_k or ALL[self.kind]}
        elif wrong := next((name for name in FURTHER if further[name] != FURTHER[name]), ""):
            raise UsageError(f"{self.address} has no field for {wrong} (now {settings.show(wrong)})")
        if self.kind.startswith("llama"):
            options["repeat_penalty"] = options.pop("repetition_penalty")
        if self.kind == "llama-server" and bias:  # in its own form `false` bans a token
            options["logit_bias"] = [[token, amount > -math.inf and amount] for (token,), amount in bias.items()]
        return options | ({"return_spec_tokens_details": True} if self.kind == "SGLang" else {})

    def data(self, part: bytes) -> bytes:
        """Return an event's data, by the HTML Living Standard, 9.2.6; empty for comments and other fields alone.
        ValueError for JSON outside an event."""
        raise_first({"plain JSON in place of a stream": part.lstrip().startswith(b"{")}, ValueError)
        data = b"\n".join(line[5:].removeprefix(b" ") for line in part.splitlines() if line.startswith(b"data:"))
        return b'{"done": true}' if data.strip() == b"[DONE]" else data

    def pieces(self, part: Json, answer: ChatAnswer) -> Iterator[tuple[str, float | None]]:
        """Yield the texts of a chunk."""
        if part == {"done": True}:
            answer.ended = answer.ended or ("stop" if answer.begun else "")
        answer.report = answer.report._replace(**_reported(part))
        for choice in field_of(part, "choices", list) or ():
            delta = field_of(choice, "delta", dict)
            text = field_of(delta, "content", str) or ""
            entries = field_of(field_of(choice, "logprobs", dict), "content", list) or []
            if text or field_of(delta, "reasoning_content", str) or field_of(delta, "reasoning", str):
                yield from token_pieces(text, entries)
            answer.logprobs += entries
            answer.ended = field_of(choice, "finish_reason", str) or answer.ended

    @contextmanager
    def counting(self, answer: ChatAnswer, runner: asyncio.Runner, client: AsyncOpenAI) -> Iterator[None]:
        """Report the growth of the server's counters where its chunks say nothing of drafts."""
        before = answer.wait(runner, _counters(client))
        yield
        if before and answer.reason != "interrupted" and answer.report.accepted is None:
            after = answer.wait(runner, _counters(client)) or {}
            answer.report = answer.report._replace(**_growth(before, after, answer.report.tokens))


def _reported(chunk: Json) -> Json:
    """Return a chunk's figures of the whole answer: `usage`, and the drafts and the rate that engines add. Leave out
    counts of drafts of which more are accepted than drafted."""
    usage = chunk.get("usage")
    figures: Json = {"tokens": count_of(usage, "completion_tokens"), "prompt_tokens": count_of(usage, "prompt_tokens")}
    for path, names in _DRAFTS.items():
        counts = {
            key: count_of(nested(chunk, *path.split(".")), name)
            for key, name in zip(("drafted", "accepted", "passes"), names, strict=True)
        }
        if (counts["accepted"] or 0) <= (counts["drafted"] or 0):
            figures |= {key: count for key, count in counts.items() if count is not None}
    for path, name in _RATES.items():
        rate = nested(chunk, path, name)
        if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < math.inf:
            figures["rate"] = float(rate)
    return {name: count for name, count in figures.items() if count is not None}


def _growth(before: Mapping[str, float], after: Mapping[str, float], tokens: int | None) -> Json:
    """Return the growth of the server's counters during an answer, {} if it did not draft. SGLang counts runs that
    verify: every one of them yields one token from the target, so the other tokens after the first are accepted
    drafts."""
    grown: Json = {name: round(after[name] - before[name]) for name in before if name in after}
    verified = grown.pop("verified", 0)
    if verified and tokens is not None:
        grown |= {"passes": verified, "accepted": max(0, tokens - 1 - verified)}
    return grown if grown.get("passes") else {}


async def _counters(client: AsyncOpenAI) -> dict[str, float]:
    """Return the server's counts of its drafts over all its answers; empty if it publishes none."""
    from openai import OpenAIError

    root = str(client.base_url).rstrip("/").removesuffix("/v1")
    try:
        text = str(await client.get(f"{root}/metrics", cast_to=str, options={"timeout": 5.0}))
    except (OpenAIError, ValueError):
        return {}
    line = r"^{}(?:\{{.*\}})? ([0-9.eE+]+)\s*$"
    values = {name: re.findall(line.format(series), text, re.MULTILINE) for name, series in _COUNTERS.items()}
    return {name: sum(map(float, each)) for name, each in values.items() if each}


def form_for(server: Server, settings: Any) -> Json:
    """Return the fields of a request that give the answer its form. UsageError if the server has none for it."""
    if settings.form is None:
        return {}
    from utils.grammar import form_text, is_lark_syntax, schema_of

    name, text = settings.form[0], form_text(*settings.form)
    if name == "json_schema":
        return {
            "response_format": (
                {"type": "json_object", "schema": schema_of(text)}
                if server.kind == "llama-cpp-python"
                else {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema_of(text), "strict": True},
                }
            )
        }
    if (field := FORM_FIELDS.get((server.kind, name))) is None or (
        field in ("grammar", "ebnf") and is_lark_syntax(text)
    ):
        why = f"has no field for {name}" if field is None else "reads grammars in GBNF, not in Lark"
        raise UsageError(f"{server.address} {why} (now {settings.show(name)})")
    return {field: {name: text} if server.kind == "vLLM" else text}


# -- Ollama's own, by docs/api.md, docs/openapi.yaml, docs/api/errors.mdx and docs/modelfile.mdx of ollama/ollama -----


class OllamaServer(Server):
    """A server that speaks Ollama's own protocol, by its URL, which ends in /api."""

    protocol = kind = "Ollama"
    chat_at = "/chat"
    models_at = ("/tags", "models", "name")
    between = rb"\n"

    def options(self, settings: Any, bias: Bias = MappingProxyType({})) -> Json:
        """Return the settings (:meth:`Server.options`); UsageError for a bias, and a form that is no JSON schema."""
        form = settings.form[0] if settings.form else ""
        if wrong := "logit_bias" if bias else form.replace("json_schema", ""):
            raise UsageError(f"{self.address} has no field for {wrong} (now {settings.show(wrong)})")
        options = {name: getattr(settings, name) for name in (*SENT, *PENALTIES, "top_k", "min_p")} | {
            "num_predict": settings.max_new_tokens,
            "repeat_penalty": settings.repetition_penalty,
            "repeat_last_n": -1,  # over all tokens
            **({"stop": list(settings.stop)} if settings.stop else {}),
        }
        if not form:
            return {"options": options}
        from utils.grammar import form_text, schema_of

        return {"options": options, "format": schema_of(form_text(*settings.form))}

    def pieces(self, part: Json, answer: ChatAnswer) -> Iterator[tuple[str, float | None]]:
        """Yield the text of a line."""
        message, entries = field_of(part, "message", dict), field_of(part, "logprobs", list) or []
        text = field_of(message, "content", str) or ""
        if text or field_of(message, "thinking", str):
            yield from token_pieces(text, entries)
        answer.logprobs += entries
        if field_of(part, "done", bool):
            answer.ended = field_of(part, "done_reason", str) or "stop"
            tokens, spent, loading = (count_of(part, name) for name in ("eval_count", "eval_duration", "load_duration"))
            answer.report = answer.report._replace(
                tokens=tokens,
                prompt_tokens=count_of(part, "prompt_eval_count"),
                rate=1e9 * tokens / spent if tokens and spent else None,
                load_s=None if loading is None else loading / 1e9,
            )


def server_at(url: str, model: str | None = None, key_env: str | None = None) -> Server:
    """Return the server at a URL: one whose path ends in /api speaks Ollama's own protocol, any other OpenAI's.
    UsageError for a port that is none."""
    port = re.search(r":([^:@\]]+)$", address_of(url))
    raise_first(
        {
            f"{url}: a port is a whole number from 0 to 65535, got {port and port[1]}": (
                port is not None and not (re.fullmatch("[0-9]{1,5}", port[1]) and int(port[1]) < 1 << 16)
            )
        }
    )
    speaks = OllamaServer if url.partition("#")[0].rstrip("/").endswith("/api") else OpenAIServer
    return speaks(url, model, key_env)
