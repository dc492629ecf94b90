"""A server that speaks ``/v1/chat/completions``, on a free port of this machine, in threads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the server answers: a verdict, or with ``body`` anything else."""

    said: str | None = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    finish_reason: str = "stop"


Answer = Callable[[str, int], Reply]  # by the user message, and the number of the request from 0


@dataclass
class Asked:
    """A request that came."""

    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def text(self) -> str:
        return str(self.body["messages"][-1]["content"])


class JudgeServer:
    """The requests that came, and how many were at work at once."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked = answer, list[Asked]()
        self.at_work = self.most_at_work = 0
        self.changed = threading.Condition()
        self.ending = threading.Event()  # for answers that wait

    def wait_for(self, count: int) -> None:
        """Until so many requests came; fails after 20 s."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, 20), f"{len(self.asked)} of {count} came"

    def handle(self, path: str, asked: Asked) -> Reply:
        with self.changed:
            number = len(self.asked)
            self.asked.append(asked)
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
            self.changed.notify_all()
        try:
            return self.answer(asked.text, number) if path == "/v1/chat/completions" else Reply(status=404, body="")
        finally:
            with self.changed:
                self.at_work -= 1


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, JudgeServer]]:
    """``(base_url, server)``."""
    judge = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            except (OSError, ValueError):
                return  # the client has gone in the middle of it
            reply = judge.handle(self.path, Asked(body, {k.lower(): v for k, v in self.headers.items()}))
            completion = {
                "id": "1", "object": "chat.completion", "created": int(time.time()), "model": body["model"],
                "choices": [{"index": 0, "finish_reason": reply.finish_reason,
                             "message": {"role": "assistant", "content": reply.said}}],
            }  # fmt: skip
            content = (json.dumps(completion) if reply.body is None else reply.body).encode()
            try:
                self.send_response(reply.status)
                for name, value in {"content-type": "application/json", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # the client has gone

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, *_: object) -> None:
            """A client that has gone is no error of the server's; by default it would be printed."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", judge
        finally:
            judge.ending.set()
            server.shutdown()
