"""The page's server: GET alone, one thread a request, nothing is asked of another server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, urlsplit

from statebackend.errors import SettingError
from statebackend.threads import THREADS, Thread, Threads
from statebackend.ui.page_access import Access, Refused, SignedIn, check_bind

__all__ = ["Answer", "PageServer", "Site"]

_log = logging.getLogger("statebackend.ui")
_PATIENCE_S: Final = 30.0  # for a browser that does not send its request, or take the answer
_HEAD: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Answer:
    """A page. ``location``: of another one to go to. ``keep``: it never changes."""

    body: bytes
    kind: str = "text/html; charset=utf-8"
    status: int = 200
    location: str = ""
    keep: bool = False
    head: dict[str, str] = field(default_factory=dict)


class Site(Protocol):
    """What answers for paths."""

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        """The page at a path; it raises nothing."""


class PageServer:
    """Serves a site until it is stopped.

    Args:
        host: the address to listen at. port: 0 for any that is free.
        token: that a browser must know; empty: none, at a loopback address only.

    Raises:
        SettingError: the address is open to a network, and there is no token; or it is taken.
    """

    def __init__(
        self, site: Site, *, host: str, port: int, token: str, threads: Threads = THREADS
    ) -> None:
        check_bind(host, token)
        handler = _handler(site, Access(token, host))
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = kind((host, port), handler)
        except (OSError, OverflowError) as error:
            raise SettingError(
                f"The page cannot be served at {host}:{port}: {error}.",
                todo="Set spark.statebackend.ui.port to another port, or 0 for any that is free.",
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread: Thread = threads.start(self._server.serve_forever, "statebackend-page")

    @property
    def url(self) -> str:
        """Where it is; without the token."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    def stop(self) -> None:
        """Serve nothing any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request of %s failed", client_address, exc_info=True)


class _Server6(_Server):
    import socket

    address_family = socket.AF_INET6


def _handler(site: Site, access: Access) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _PATIENCE_S
        server_version, sys_version = "statebackend", ""

        def do_GET(self) -> None:
            self._send(self._answer(), body=True)

        def do_HEAD(self) -> None:
            self._send(self._answer(), body=False)

        def _answer(self) -> Answer:
            head = self.headers
            decided = access.decide(
                self.path, head.get("Host"), head.get("Authorization"), head.get("Cookie")
            )
            match decided:
                case Refused(status=status, text=text):
                    return Answer(f"{text}\n".encode(), "text/plain; charset=utf-8", status)
                case SignedIn(location=location, cookie=cookie):
                    kept = f"{cookie}; Path=/; HttpOnly; SameSite=Strict"
                    return Answer(b"", status=303, location=location, head={"Set-Cookie": kept})
            found = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(found.query).items()}
            return site.answer(found.path, query)

        def _send(self, answer: Answer, *, body: bool) -> None:
            self.send_response(answer.status)
            for name, value in {**_HEAD, **answer.head}.items():
                self.send_header(name, value)
            kept = "private, max-age=86400, immutable" if answer.keep else "no-store"
            self.send_header("Cache-Control", kept)
            if answer.location:
                self.send_header("Location", answer.location)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if body:
                self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a token may stand in the path."""

    return Handler
