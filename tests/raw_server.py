"""A server on the loopback interface that answers with exactly the bytes that a test gives it, and then hangs up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = bytes | list[bytes | float]
"""Bytes from the status line on; in a list a number is a pause in seconds."""


def plain(body: bytes | str, status: str = "200 OK", *headers: str) -> bytes:
    """An answer of a known length."""
    data = body.encode() if isinstance(body, str) else body
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *headers])
    return head.encode() + b"\r\n\r\n" + data


def stream(*parts: bytes | str | float, chunked: bool = True, ended: bool = True) -> list[bytes | float]:
    """An answer in parts, each sent by itself. ``ended`` False: the connection breaks after the last one."""
    kind = b"Transfer-Encoding: chunked\r\n" if chunked else b""
    found: list[bytes | float] = [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + kind + b"\r\n"]
    for part in parts:
        if isinstance(part, float):
            found.append(part)
            continue
        data = part.encode() if isinstance(part, str) else part
        found.append(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
    return [*found, b"0\r\n\r\n"] if chunked and ended else found


class RawServer:
    """``answers``: by path, or by method and path; one that is not there is 404. ``asked``: what came. ``key``: who
    does not show it is refused, and told what was shown."""

    def __init__(self, answers: dict[str, Answer], key: str | None = None) -> None:
        self.answers, self.asked = answers, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None: ...

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.asked.append(f"{self.command} {self.path}")
                given = outer.answers.get(outer.asked[-1], outer.answers.get(self.path, plain("no", "404 Not Found")))
                shown = self.headers.get("Authorization")
                if key is not None and shown != f"Bearer {key}":
                    given = plain(f'{{"error": "no such key: {shown}"}}', "401 Unauthorized")
                try:
                    for part in [given] if isinstance(given, bytes) else given:
                        if isinstance(part, float):
                            time.sleep(part)
                        else:
                            self.wfile.write(part)
                            self.wfile.flush()
                except OSError:
                    pass  # whoever asked has gone
                self.close_connection = True

            do_POST = do_GET

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    asked: list[str]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def raw_server(answers: dict[str, Answer], key: str | None = None) -> Iterator[RawServer]:
    """A `RawServer` for a while."""
    server = RawServer(answers, key)
    try:
        yield server
    finally:
        server.close()
