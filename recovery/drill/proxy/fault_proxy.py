"""A proxy on loopback between S3 clients and an S3 server: it counts requests and injects faults.

A thread per connection, blocking sockets, bodies in pieces of at most 64 KiB: a slow reader slows
the sender down, and nothing piles up here. Only requests that are held or doubled are kept whole,
on disk when they are over 1 MiB; those over 256 MiB pass unharmed.

The proxy takes `Expect: 100-continue` upon itself: it invites the body and does not pass the header
on. Requests are otherwise forwarded as they were signed. Nothing of their headers or queries is
kept or printed.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from os import PathLike
from types import TracebackType
from typing import TypeAlias

from recovery.drill.proxy.controls import Controls, CutError, StoppedError
from recovery.drill.proxy.fault_plan import Calm, FaultPlan
from recovery.drill.proxy.http import MalformedError, Wire
from recovery.drill.proxy.ledger import Count, Ledger, RequestEntry
from recovery.drill.proxy.proxied_request import ProxiedRequest
from recovery.drill.proxy.s3_requests import Verb, group_of
from recovery.drill.proxy.upstream import Upstream
from statebackend.errors import SettingError

__all__ = ["FaultProxy"]

CLIENT_TIMEOUT_S = 120.0
CONNECTIONS_MAX = 256
JOIN_TIMEOUT_S = 10.0

Tls: TypeAlias = ssl.SSLContext | tuple[str | PathLike[str], str | PathLike[str]]


class FaultProxy:
    """Stands on 127.0.0.1, on a port of its own, in threads of this process. Thread-safe.

    Use it as a context manager, or call `start` and `stop`. A proxy starts once.

    Clients use `url` as their endpoint. The addresses in the answers (`Location`) stay the
    server's own.
    """

    def __init__(
        self,
        upstream: str,
        *,
        seed: int = 0,
        plan: FaultPlan | None = None,
        tls: Tls | None = None,
        group: Callable[[str], str] = group_of,
        entries_max: int = 10_000,
    ) -> None:
        """Prepare, without a socket.

        Args:
            upstream: the server, `host:port`, plain HTTP.
            seed: of the plan's draws.
            plan: what happens to which request; None is no faults.
            tls: towards the clients: a server's context, or the paths of a certificate chain and
                of its key (PEM). None is plain HTTP.
            group: from a key to the group that it is counted under.
            entries_max: how many single requests `requests` remembers.

        Raises:
            SettingError: `upstream` is not `host:port`.
        """
        host, _, port = upstream.rpartition(":")
        if not host or not port.isdigit():
            raise SettingError(
                f"The upstream {upstream!r} is not host:port.", todo="Use e.g. 127.0.0.1:9000."
            )
        self._address = (host.strip("[]"), int(port))
        self._controls = Controls(plan or Calm(), seed)
        self._ledger = Ledger(clock=time.monotonic, entries_max=entries_max, group=group)
        self._tls = _context(tls)
        self._listener: socket.socket | None = None
        self._port = 0
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> FaultProxy:
        """Listen. Raises `SettingError` if it was started before."""
        if self._acceptor is not None:
            raise SettingError("The fault proxy was started before.", todo="Make a new one.")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(
            target=self._accept, args=(self._listener,), name="drill-accept", daemon=True
        )
        self._acceptor.start()
        return self

    def stop(self) -> None:
        """End every connection, held requests undelivered, and wait for the threads. Idempotent."""
        self._controls.stop()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor, unlike close
        if self._acceptor is not None:
            self._acceptor.join(JOIN_TIMEOUT_S)
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            wires, threads = list(self._wires), list(self._threads)
        for wire in wires:
            wire.sever()
        for thread in threads:
            thread.join(JOIN_TIMEOUT_S)

    def __enter__(self) -> FaultProxy:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"FaultProxy({self.url!r} -> {self._address[0]}:{self._address[1]})"

    @property
    def port(self) -> int:
        """Where it listens; 0 before `start`."""
        return self._port

    @property
    def url(self) -> str:
        """The endpoint for clients. The certificate, if any, must be for 127.0.0.1."""
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._port}"

    # --- switches ------------------------------------------------------------------------------

    @property
    def plan(self) -> FaultPlan:
        """What happens to the requests that arrive from now on."""
        return self._controls.plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        self._controls.plan = plan

    def go_down(self) -> None:
        """Reset every request that arrives from now on; what is under way goes on."""
        self._controls.down = True

    def come_up(self) -> None:
        """End `go_down`."""
        self._controls.down = False

    def set_pace(self, *, latency_s: float = 0.0, bytes_per_s: int = 0) -> None:
        """Make every request slower: a wait before each, and a rate for each body (0: no limit)."""
        if latency_s < 0 or bytes_per_s < 0:
            raise SettingError("The pace of a fault proxy cannot be negative.")
        self._controls.latency_s = latency_s
        self._controls.bytes_per_s = bytes_per_s

    def held(self) -> list[int]:
        """The numbers of the requests that are held, oldest first."""
        return self._controls.held()

    def wait_held(self, count: int = 1, *, timeout_s: float) -> bool:
        """Wait until at least this many requests are held; False if the time ran out."""
        return self._controls.wait_held(count, timeout_s)

    def release(self, number: int | None = None) -> int:
        """Deliver one held request now, or all of them; how many. `wait_idle` says when done."""
        return self._controls.release(number)

    def wait_idle(self, *, timeout_s: float) -> bool:
        """Wait until no request is under way, held ones included; False if the time ran out."""
        return self._ledger.wait_idle(timeout_s)

    # --- counting ------------------------------------------------------------------------------

    def counts(self) -> dict[tuple[Verb, str], Count]:
        """Totals by verb and group since the last `reset`, refused requests included."""
        return self._ledger.counts()

    def count(self, *verbs: Verb, group: str | None = None) -> Count:
        """The totals of these verbs (none given: all) in this group (None: all) together."""
        wanted: Iterable[Verb] | None = verbs or None
        return self._ledger.count(wanted, group)

    def requests(self) -> list[RequestEntry]:
        """The last requests, oldest first, running ones included."""
        return self._ledger.entries()

    def reset(self) -> None:
        """Forget counts and requests, and number from 1 again, for the plan too."""
        self._ledger.reset()

    # --- connections ---------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._controls.stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:  # stopped, or out of descriptors: then a moment later
                self._controls.stopping.wait(0.05)
                continue
            thread = threading.Thread(
                target=self._serve, args=(sock,), name="drill-connection", daemon=True
            )
            with self._lock:
                full = len(self._threads) >= CONNECTIONS_MAX
                if not full:
                    self._threads.add(thread)
                    thread.start()
            if full:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        upstream = Upstream(self._address, self._opened)
        try:
            sock.settimeout(CLIENT_TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            wire = Wire(sock)
            self._opened(wire)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            self._converse(wire, upstream)
        except (OSError, MalformedError, StoppedError):
            upstream.reset()  # one side is gone or speaks nonsense: no half request may count
        finally:
            upstream.close()
            sock.close()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _converse(self, wire: Wire, upstream: Upstream) -> None:
        while not self._controls.stopping.is_set():
            head = wire.read_head()
            if head is None:
                break
            try:
                if not ProxiedRequest(self._controls, self._ledger, wire, upstream, head).run():
                    break
            except CutError as cut:
                if cut.orderly:
                    wire.abandon()
                else:
                    wire.reset()
                return
        wire.close()

    def _opened(self, wire: Wire) -> None:
        with self._lock:
            self._wires.add(wire)
        if self._controls.stopping.is_set():  # `stop` may have looked before
            wire.sever()


def _context(tls: Tls | None) -> ssl.SSLContext | None:
    if tls is None or isinstance(tls, ssl.SSLContext):
        return tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls)
    return context
