"""A server that speaks OpenAI's protocol: its chat answers piece by piece, and what it reports of each.

The official client does the talking and is imported with the first request. Everything that can go wrong is a
UserError in one line. Knows no lanes and no screen.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from utils.errors import UsageError, UserError, shown
from utils.objects import Json
from utils.remote.pieces import ServerFigures

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from utils.logits_processors import Bias

OWN = "server"  # the lane of the pair's own server; other servers' lanes have their URLs for names
SILENCE = 300.0  # seconds without a byte after which a server is given up: a large model may be loading
_LOOK = 0.05  # seconds between two looks at the interrupt
_COUNTERS = {  # of /metrics, by what they count; vLLM's, then SGLang's, which counts no drafts
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "passes": "vllm:spec_decode_num_drafts_total",
    "verified": "sglang:spec_verify_calls_total",
}
_DRAFTS = {  # by its place in a chunk: an engine's own counts of an answer's drafts, accepted ones and passes
    "timings": ("draft_n", "draft_n_accepted", ""),  # llama-server: tools/server/README.md
    "metrics.speculative_decoding": ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps"),  # vLLM 0.32:
    # docs/features/speculative_decoding/acceptance_metrics.md; SGLang answers `return_spec_tokens_details` (its #33518)
    "sglext.spec_tokens_details": ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct"),
    "stats": ("total_draft_tokens_count", "accepted_draft_tokens_count", ""),  # LM Studio 0.3.10, release notes …
    "usage": ("total_draft_tokens_count", "accepted_draft_tokens_count", ""),  # … or here
}
_COUNTED = ("drafted", "accepted", "passes")
_RATES = {"timings": "predicted_per_second", "metrics": "tokens_per_second", "stats": "tokens_per_second"}
_DONE = "[DONE]"  # the data of the event that ends a stream
_KINDS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama-server", "me": "llama-cpp-python"}

SENT = ("temperature", "top_p", "seed")
PENALTIES = ("presence_penalty", "frequency_penalty")
BAN = -100.0  # a bias that makes a token impossible
FURTHER = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that the protocol has no field for, some engines have, and the value of each that is off."""

ALL = {"vLLM": -1, "SGLang": -1, "llama-server": 0, "llama-cpp-python": 0}
"""Engines that take those fields, and the value of `top_k` that allows every token: a field that is left out has the
engine's own default."""


FORM_FIELDS = {  # of a form that is no JSON schema (engines' "Structured Outputs"; llama.cpp's tools/server/README.md)
    **dict.fromkeys((("vLLM", "grammar"), ("vLLM", "regex")), "structured_outputs"),
    **{("SGLang", "grammar"): "ebnf", ("SGLang", "regex"): "regex"},
    **dict.fromkeys((("llama-server", "grammar"), ("llama-cpp-python", "grammar")), "grammar"),
}

Result = TypeVar("Result")
FieldType = TypeVar("FieldType")
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


class ServerProtocol(Protocol):
    """What the program needs from a server, whatever its protocol; UserError, one line, for whatever goes wrong."""

    @property
    def address(self) -> str:
        """HOST:PORT."""

    def stream(
        self,
        messages: Sequence[ServerMessage],
        settings: Any,
        bias: Bias,
        interrupt: Callable[[], bool],
        top_logprobs: int | None = None,
    ) -> ChatAnswer:
        """Return the answer to a chat, with what it reports when it is over; `top_logprobs` log-probabilities of each
        token, None: none at all."""

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """Return the JSON that comes back for a body: how drafts are scored (sampling/models/remote.py)."""


@dataclass(frozen=True)
class Server:
    """A server that speaks OpenAI's protocol (:class:`ServerProtocol`), by its URL, which ends in /v1.

    Args:
        model: the name it knows the model by; None: its only one. A URL may end in #MODEL too.
        key_env: the environment variable that holds its key.
        silence: seconds without a byte after which it is given up.
    """

    url: str
    model: str | None = None
    key_env: str | None = None
    silence: float = SILENCE

    @property
    def address(self) -> str:
        return address_of(self.url)

    @property
    def name(self) -> str:
        """The model's name, or the address where none is given."""
        return self.model or self.url.partition("#")[2] or self.address

    @cached_property
    def arguments(self) -> Json:
        """The arguments of the official client. UsageError where the key is not there."""
        key = os.environ.get(self.key_env, "") if self.key_env else "none"
        if not key:
            raise UsageError(f"{self.address} needs a key in the environment variable {self.key_env}, which is not set")
        base = self.url.partition("#")[0].rstrip("/")
        return {"base_url": base, "api_key": key, "max_retries": 0, "timeout": self.silence}

    @cached_property
    def _client(self) -> Any:
        from openai import OpenAI

        return OpenAI(**self.arguments)

    @cached_property
    def _models(self) -> list[Mapping[str, object]]:
        """The models that the server lists; none where it has no list (`transformers serve` answers 500 where the hub's
        cache is not there). UserError if it is absent or refuses."""
        from openai import InternalServerError, NotFoundError

        with self.reading():
            try:
                listed = _in(self._client.get("/models", cast_to=object), "data", list) or []
            except (NotFoundError, InternalServerError):
                return []
            return [model for model in listed if _in(model, "id", str)]

    @property
    def kind(self) -> str:
        """Which program it is, by the owner that it names for its models; "" where that says nothing."""
        return next((_KINDS.get(str(model.get("owned_by")), "") for model in self._models), "")

    @property
    def context(self) -> int | None:
        """The most tokens that a text may have, where the server says so (vLLM does)."""
        return next(filter(None, (_count_in(model, "max_model_len") for model in self._models)), None)

    @property
    def chosen(self) -> str | None:
        """The model to ask for; None where the server names none. UsageError for several, UserError for no server."""
        if given := self.model or self.url.partition("#")[2]:
            return given
        names = [str(model["id"]) for model in self._models]
        if len(names) > 1:
            shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
            raise UsageError(f"{self.address} has several models: --model names one of {shown}")
        return names[0] if names else None

    def stream(
        self,
        messages: Sequence[ServerMessage],
        settings: Any,
        bias: Bias,
        interrupt: Callable[[], bool],
        top_logprobs: int | None = None,
    ) -> ChatAnswer:
        """Return the answer to a chat (:meth:`ServerProtocol.stream`). UsageError for a setting that it has no field
        for."""
        wanted = {} if top_logprobs is None else {"logprobs": True, "top_logprobs": top_logprobs}
        return ChatAnswer(self, messages, {**options_for(self, settings, bias), **wanted}, interrupt)

    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """Return the JSON that comes back for a body of JSON; a path with two slashes begins at the server's root."""
        path = self.arguments["base_url"].removesuffix("/v1") + path[1:] if path.startswith("//") else path
        named = {} if self.chosen is None else {"model": self.chosen}
        with self.reading():
            answer: Json = self._client.post(path, body={**named, **body}, cast_to=object)
            _in(answer, "error", object)  # refuses a web page
            return answer

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn whatever goes wrong with the server into a UserError of one line."""
        try:
            yield
        except Exception as error:
            if problem := problem_of(error, self):
                raise UserError(problem) from error
            raise


def problem_of(error: BaseException, server: Server) -> str:
    """Return a server's mistake, in one line; "" for an error that is none of its."""
    import openai

    at = server.address
    # A stream that is being read raises the errors of the client's own client, whose module has had two names.
    broke = error if type(error).__module__.startswith("httpx") else None
    if isinstance(error, openai.APITimeoutError) or "Timeout" in type(broke).__name__:
        return f"{at} sent nothing for {server.silence:g} s"
    if broke or isinstance(error, openai.APIConnectionError):
        why = _line(error.__cause__ or error)
        refused = isinstance(error.__cause__, OSError) or "connect" in type(error.__cause__).__name__.lower()
        return f"no server answers at {at} ({why})" if refused else f"{at} closed the connection ({why})"
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        where = f"the key in {server.key_env}" if server.key_env else "a request without a key (key_env in models.yaml)"
        return f"{at} refuses {where}: {_said(error.body or error)}"
    if isinstance(error, openai.APIStatusError):
        return f"{at} answers {error.status_code}: {_said(error.body or error)}"
    if isinstance(error, openai.OpenAIError | ValueError | TypeError | AttributeError | LookupError):
        return f"{at} sends no answer in OpenAI's protocol ({_line(error)})"
    return ""


def _said(body: object) -> str:
    """Return the server's own words for an error."""
    for key in ("error", "message", "detail"):
        body = body.get(key) or body if isinstance(body, Mapping) else body
    return _PAGE if _is_page(body) else _line(body)


_PAGE = "a web page in place of an API: a URL ends in /v1"


def _is_page(body: object) -> bool:
    """Return whether a body is HTML or XML, which no JSON and no stream of events begins like."""
    return isinstance(body, str) and body.lstrip().startswith("<")


def _line(error: object) -> str:
    """At most 200 characters on one line."""
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:200]


@dataclass
class ChatAnswer:
    """A server's answer to a chat: iterates over (text, seconds since the piece before), the request's for the first.

    Text that is sent apart, such as reasoning, counts as a piece without text. `logprobs` are the entries of its
    tokens, if they were wanted, `log_prob` that of the latest piece, None where the server gives none. `reason` and
    `report` hold when it is over. UserError where the server fails before the first piece; later `report.problem` says
    why it ends.
    """

    server: Server
    messages: Sequence[ServerMessage]
    options: Mapping[str, object]
    interrupt: Callable[[], bool]
    reason: Literal["eos", "length", "interrupted"] = "interrupted"
    logprobs: list[Json] = field(default_factory=list)
    report: ServerFigures = field(default_factory=ServerFigures)
    log_prob: float | None = None

    def __iter__(self) -> Iterator[tuple[str, float]]:
        from openai import AsyncOpenAI, omit

        request_fields = {"model": self.server.chosen or omit, "messages": list(self.messages), **self.options}
        client, begun = AsyncOpenAI(**self.server.arguments), False
        try:
            with self.server.reading(), asyncio.Runner() as runner:
                before = self._wait(runner, _counters(client))
                create, last = client.chat.completions.with_streaming_response.create, time.monotonic()
                for text in self._texts(runner, create, request_fields):
                    now = time.monotonic()
                    yield text, now - last
                    last, begun = now, True
                if before and self.reason != "interrupted" and self.report.accepted is None:
                    self._count(before, self._wait(runner, _counters(client)) or {})
        except UserError as error:
            if not begun:
                raise
            self.report = self.report._replace(problem=str(error))

    def _texts(self, runner: asyncio.Runner, create: Any, request_fields: Json) -> Iterator[str]:
        """Yield the pieces as they come."""
        chunks, ended, said = asyncio.Queue[Any](), "", False
        opening = create(stream=True, stream_options={"include_usage": True}, **request_fields)
        reading = runner.get_loop().create_task(_read(opening, chunks))
        while (chunk := self._wait(runner, chunks.get())) is not None:
            if chunk == _DONE:
                ended = ended or ("stop" if said else "")
                continue
            if error := _in(chunk, "error", object):
                raise UserError(f"{self.server.address} broke off: {_said(error)}")
            self._report(chunk)
            for choice in _in(chunk, "choices", list) or ():
                delta = _in(choice, "delta", dict)
                content = _in(delta, "content", str) or ""
                listed = _in(_in(choice, "logprobs", dict), "content", list) or []
                self.logprobs += listed
                if content or _in(delta, "reasoning_content", str) or _in(delta, "reasoning", str):
                    said, tokens = True, [(each["token"], float(each["logprob"])) for each in listed]
                    if not tokens or "".join(text for text, _ in tokens) != content:  # a character of several tokens
                        tokens = [(content, sum(value for _, value in tokens))]
                    for text, value in tokens:
                        self.log_prob = value if listed else None
                        yield _whole(text)
                ended = _in(choice, "finish_reason", str) or ended
        if reading.done():
            reading.result()
        if self.interrupt() and not ended:
            return
        if not ended:
            raise UserError(f"{self.server.address} closed the connection before the answer's end")
        self.reason = "length" if ended == "length" else "eos"
        if ended not in ("length", "stop"):
            self.report = self.report._replace(problem=f"{self.server.address} ended it: {_line(ended)}")

    def _wait(self, runner: asyncio.Runner, work: Awaitable[Result]) -> Result | None:
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

    def _report(self, chunk: Json) -> None:
        """Take over what a chunk says of the whole answer: `usage`, and what engines add of drafts and their rate."""
        usage = chunk.get("usage")
        found: Json = {
            "tokens": _count_in(usage, "completion_tokens"),
            "prompt_tokens": _count_in(usage, "prompt_tokens"),
        }
        for place, names in _DRAFTS.items():
            counts = (_count_in(_at(chunk, place), name) for name in names)
            found |= {key: count for key, count in zip(_COUNTED, counts, strict=True) if count is not None}
        for place, name in _RATES.items():
            rate = (_at(chunk, place) or {}).get(name)
            if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < math.inf:
                found["rate"] = float(rate)
        self.report = self.report._replace(**{name: count for name, count in found.items() if count is not None})

    def _count(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Report the growth of the server's counters during the answer. SGLang counts runs that verify: every one of
        them yields one token from the target, so the other tokens after the first are accepted drafts."""
        grown: Json = {name: round(after[name] - before[name]) for name in before if name in after}
        verified, tokens = grown.pop("verified", 0), self.report.tokens
        if verified and tokens is not None:
            grown |= {"passes": verified, "accepted": max(0, tokens - 1 - verified)}
        if grown.get("passes"):
            self.report = self.report._replace(**grown)


async def _read(opening: Any, chunks: asyncio.Queue[Any]) -> None:
    """Put a stream's chunks into the queue, and None after them. One task reads them all: a stream that no task is
    reading cannot be closed in order."""
    try:
        async with opening as response:
            async for data in _events(response.iter_bytes()):
                chunks.put_nowait(data if data == _DONE else json.loads(data or "{}") or {})
                if data == _DONE:
                    break
    finally:
        chunks.put_nowait(None)


async def _counters(client: AsyncOpenAI) -> dict[str, float]:
    """Return the server's counts of its drafts over all its answers; empty if it publishes none."""
    from openai import OpenAIError

    root = str(client.base_url).rstrip("/").removesuffix("/v1")
    try:
        text = str(await client.get(f"{root}/metrics", cast_to=str, options={"timeout": 5.0}))
    except (OpenAIError, ValueError):
        return {}
    counts = {}
    for name, series in _COUNTERS.items():
        values = re.findall(rf"^{series}(?:\{{.*\}})? ([0-9.eE+]+)\s*$", text, re.MULTILINE)
        if values:
            counts[name] = sum(map(float, values))
    return counts


def _whole(text: str) -> str:
    """Return the text with surrogate pairs joined and lone ones replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _at(chunk: Mapping[str, object], place: str) -> Mapping[str, object] | None:
    """Return the record at a dotted place of a chunk; None where there is none."""
    record: object = chunk
    for name in place.split("."):
        record = record.get(name) if isinstance(record, Mapping) else None
    return record if isinstance(record, Mapping) else None


def _count_in(record: object, name: str) -> int | None:
    """Return a count in part of an answer, whatever stands there."""
    value = record.get(name) if isinstance(record, Mapping) else None
    return value if isinstance(value, int) and value >= 0 and not isinstance(value, bool) else None


def _in(record: object, name: str, kind: type[FieldType]) -> FieldType | None:
    """Return a field of part of an answer; None where it, or that part, is missing or null. ValueError for a value of
    another type."""
    if record is not None and not isinstance(record, Mapping):
        raise ValueError(_PAGE if _is_page(record) else f"{shown(record)} in place of an object")
    value = None if record is None else record.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} is {shown(value)}")
    return value


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the data of a stream's events, the last of which may lack its end."""
    rest = b""
    async for part in parts:
        *events, rest = re.split(rb"\r?\n\r?\n", rest + part)
        for event in events:
            yield _data_of(event)
    yield _data_of(rest)


def _data_of(event: bytes) -> str:
    """Return an event's data, by the HTML Living Standard, 9.2.6; "" for comments and other fields alone. ValueError
    for a web page."""
    if event.lstrip().startswith(b"<"):
        raise ValueError(_PAGE)
    lines = (line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:"))
    return b"\n".join(lines).decode().strip()


# -- the settings as fields of a request --------------------------------------------------------------------


def options_for(server: Server, settings: Any, bias: Bias = MappingProxyType({})) -> Json:
    """The settings as a request has them, and the bias of ids. UsageError for one that the server has no field for."""
    options = {name: getattr(settings, name) for name in SENT} | {"max_tokens": settings.max_new_tokens}
    options |= {"stop": list(settings.stop)} if settings.stop else {}
    options |= {name: value for name in PENALTIES if (value := getattr(settings, name))}
    options |= {"logit_bias": {str(token): max(BAN, amount) for (token,), amount in bias.items()}} if bias else {}
    if server.kind in ALL:
        fields = {name: getattr(settings, name) for name in FURTHER}
        fields["top_k"] = fields["top_k"] or ALL[server.kind]
        if server.kind.startswith("llama"):
            fields["repeat_penalty"] = fields.pop("repetition_penalty")
        if server.kind == "llama-server" and bias:  # its own form bans for certain
            fields["logit_bias"] = [[token, amount > -math.inf and amount] for (token,), amount in bias.items()]
        if server.kind == "SGLang":
            fields["return_spec_tokens_details"] = True
        return {**options, "extra_body": {**fields, **form_for(server, settings)}}
    options |= form_for(server, settings)
    for name, off in FURTHER.items():
        if getattr(settings, name) != off:
            raise UsageError(f"{server.address} has no field for {name} (now {settings.show(name)})")
    return options


def form_for(server: Server, settings: Any) -> Json:
    """The fields of a request that give the answer its form. UsageError where the server has none."""
    if settings.form is None:
        return {}
    from utils.grammar import form_text, is_lark_syntax, schema_of

    name, text = settings.form[0], form_text(*settings.form)
    if name == "json_schema":
        schema = schema_of(text)
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        plain = {"type": "json_object", "schema": schema}
        return {"response_format": plain if server.kind == "llama-cpp-python" else named}
    field = FORM_FIELDS.get((server.kind, name))
    if field is None or (field in ("grammar", "ebnf") and is_lark_syntax(text)):
        why = f"has no field for {name}" if field is None else "reads grammars in GBNF, not in Lark"
        raise UsageError(f"{server.address} {why} (now {settings.show(name)})")
    return {field: {name: text} if server.kind == "vLLM" else text}
