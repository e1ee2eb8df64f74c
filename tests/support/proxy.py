"""An HTTP(S) forwarder on loopback: records requests, and does to them what a plan says.

Over TLS botocore sends what it sends in production (no payload signature), and neither ministack
nor moto speaks TLS: so this stands in front.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

__all__ = ["Fault", "Proxy", "Request", "answer", "drop_after", "drop_before", "truncate"]

_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}


@dataclass(frozen=True)
class Request:
    """A request's head and body as they came."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class Fault:
    """What is done instead of passing a request and its answer on."""

    forward: bool = False
    status: int = 0  # answered instead; 0: the connection is closed
    body: bytes = b""
    keep_bytes: int = -1  # of the true answer's body; then the connection is closed


def drop_before() -> Fault:
    """The server never sees the request."""
    return Fault()


def drop_after() -> Fault:
    """The server does what is asked; the answer is lost."""
    return Fault(forward=True)


def truncate(keep_bytes: int) -> Fault:
    """The answer's body breaks off."""
    return Fault(forward=True, keep_bytes=keep_bytes)


def answer(status: int, code: str, message: str = "injected") -> Fault:
    """An error in S3's form, without the server."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Fault(status=status, body=body.encode())


class Proxy:
    """One listening port in front of one server; thread per connection."""

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.plan: Callable[[Request], Fault | None] = lambda request: None
        self.upstream = urlsplit(upstream).netloc
        self._server = _Server(self, tls)
        host, port = self._server.server_address[:2]
        self.url = f"{'https' if tls else 'http'}://{host!s}:{port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def reset(self) -> None:
        """Forget requests and plan."""
        self.requests.clear()
        self.plan = lambda request: None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: Proxy, tls: ssl.SSLContext | None) -> None:
        self.proxy = proxy
        self.tls = tls
        super().__init__(("127.0.0.1", 0), _Handler)

    def finish_request(self, request: socket.socket, client_address: object) -> None:
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        try:  # here and not in accept: a slow handshake must not stop the others
            with self.tls.wrap_socket(request, server_side=True) as wrapped:
                super().finish_request(wrapped, client_address)
        except OSError:
            pass  # a client that does not trust us, or went away

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up as they like."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def handle(self) -> None:
        self.upstream = http.client.HTTPConnection(self.server.proxy.upstream, timeout=60)
        try:
            super().handle()
        except OSError:
            pass
        finally:
            self.upstream.close()

    def pass_on(self) -> None:
        proxy = self.server.proxy
        request = self._request()
        proxy.requests.append(request)
        fault = proxy.plan(request)
        if fault is not None and not fault.forward:
            self._refuse(fault)
            return
        self.upstream.putrequest(
            request.method, request.path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "expect"):
                self.upstream.putheader(name, value)
        if "content-length" not in request.headers and request.body:
            self.upstream.putheader("Content-Length", str(len(request.body)))
        self.upstream.endheaders(request.body or None)
        self._answer(fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def _request(self) -> Request:
        headers = {name.lower(): value for name, value in self.headers.items()}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(headers.get("content-length", 0)))
        return Request(self.command, self.path, headers, body)

    def _chunk(self) -> bytes:
        length = int(self.rfile.readline().split(b";")[0], 16)
        chunk = self.rfile.read(length)
        self.rfile.readline()
        return chunk

    def _refuse(self, fault: Fault) -> None:
        if not fault.status:
            self.close_connection = True
            return
        self.send_response(fault.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(fault.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(fault.body)

    def _answer(self, fault: Fault | None) -> None:
        found = self.upstream.getresponse()
        body = found.read()
        if fault is not None and fault.keep_bytes < 0:
            self.close_connection = True
            return
        self.send_response_only(found.status, found.reason)
        for name, value in found.getheaders():
            if name.lower() not in _HOP and name.lower() != "content-length":
                self.send_header(name, value)
        said = found.getheader("Content-Length") if self.command == "HEAD" else None
        if found.status != 204:
            self.send_header("Content-Length", said or str(len(body)))
        self.end_headers()
        if fault is not None:
            body = body[: fault.keep_bytes]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
