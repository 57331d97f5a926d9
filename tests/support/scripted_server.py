"""An HTTP server on this machine that answers as a test scripts it, in the formats of real ones."""

import json
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Act = Callable[["Reply", dict[str, Any]], None]


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a chat's stream."""
    delta = {} if text is None else {"content": text}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def usage(tokens: int, prompt_tokens: int = 7) -> dict[str, Any]:
    """The last chunk of a stream: what the answer took."""
    count = {"completion_tokens": tokens, "prompt_tokens": prompt_tokens, "total_tokens": tokens + prompt_tokens}
    return {**chunk(), "choices": [], "usage": count}


def said(*texts: str, finish: str = "stop", tokens: int | None = None) -> list[dict[str, Any]]:
    """The chunks of a whole answer, a token each unless the server counts otherwise."""
    return [*map(chunk, texts), chunk(finish=finish), usage(len(texts) if tokens is None else tokens)]


class Reply(BaseHTTPRequestHandler):
    """One request. What it raises for a client that has left is not said."""

    protocol_version = "HTTP/1.1"
    server: "ScriptedServer"

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self._act({})

    def do_POST(self) -> None:
        self._act(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _act(self, body: dict[str, Any]) -> None:
        self.server.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        try:
            self.server.acts.get(self.path, lambda reply, _: reply.json({"error": "no such path"}, 404))(self, body)
        except OSError:
            self.server.left.set()
        self.close_connection = True

    def begin(self, status: int = 200, kind: str = "text/event-stream") -> None:
        """Send the head of an answer of unknown length."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()

    def json(self, data: Any, status: int = 200) -> None:
        self.begin(status, "application/json")
        self.wfile.write(json.dumps(data).encode())

    def raw(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def part(self, data: Any) -> None:
        """Send a part of a stream in the server's protocol: data, JSON in bytes, or a piece of text."""
        data = self.server.chunk(data) if isinstance(data, str) else data
        self.raw(self.server.framed % (data if isinstance(data, bytes) else json.dumps(data).encode()))

    def events(self, chunks: Iterable[Any], done: bool = True) -> None:
        """Send the parts of a stream (:meth:`part`), and its end."""
        self.begin()
        for each in chunks:
            self.part(each)
        if done and self.server.base == "v1":
            self.raw(b"data: [DONE]\n\n")


class ScriptedServer(ThreadingHTTPServer):
    """Answers each path by its act; `requests` are (path, headers, body), `left` is set when a client has gone."""

    daemon_threads = True
    base, framed, chunk = "v1", b"data: %b\n\n", staticmethod(chunk)

    def __init__(
        self, chat: Act | list[dict[str, Any]], models: Iterable[str] = ("m",), owner: str = "x", **acts: Act
    ) -> None:
        super().__init__(("127.0.0.1", 0), Reply)
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.left = threading.Event()
        listed = {"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner} for name in models]}
        self.acts: dict[str, Act] = {
            "/v1/models": lambda reply, _: reply.json(listed),
            "/v1/chat/completions": chat if callable(chat) else lambda reply, _: reply.events(chat),
            **{f"/{path.replace('__', '/')}": act for path, act in acts.items()},
        }
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.base}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def line(text: str, **more: Any) -> dict[str, Any]:
    """A line of a chat's stream in Ollama's own protocol (docs/api.md of ollama/ollama)."""
    head = {"model": "llama3.2", "created_at": "2023-08-04T08:52:19.385406455-07:00", "done": False}
    return {**head, "message": {"role": "assistant", "content": text, "images": None}, **more}


LAST = {  # the end of a stream, by "Chat Request (Streaming)" there: durations are nanoseconds
    **{"model": "llama3.2", "created_at": "2023-08-04T19:22:45.499127Z", "done": True, "done_reason": "stop"},
    **{"total_duration": 4883583458, "load_duration": 1334875000, "prompt_eval_count": 26},
    **{"prompt_eval_duration": 342546000, "eval_count": 282, "eval_duration": 4535599000},
    "message": {"role": "assistant", "content": ""},  # not in that example; the official client demands it
}


class ScriptedOllama(ScriptedServer):
    """The same with Ollama's own protocol."""

    base, framed, chunk = "api", b"%b\n", staticmethod(line)

    def __init__(
        self, chat: Act | list[dict[str, Any]], models: Iterable[str] = ("llama3.2:latest",), **acts: Act
    ) -> None:
        listed = {"models": [{"name": name, "model": name, "size": 1} for name in models]}
        super().__init__(chat, **{"api__tags": lambda reply, _: reply.json(listed), **acts})
        self.acts = {"/api/chat": self.acts["/v1/chat/completions"], **self.acts}
