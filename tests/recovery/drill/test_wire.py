"""HTTP at the proxy, byte for byte, with raw sockets on both sides."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from socket import SocketIO

import pytest

from recovery.drill import Fault, FaultProxy, Kind, Rule, Script, Verb
from recovery.drill.proxy.body_faults import act_at
from statebackend.errors import SettingError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TIMEOUT_S = 10.0

Answer = Callable[[bytes], bytes | None]


class Server:
    """Answers each request by a function of its bytes; None ends the connection unanswered."""

    def __init__(self) -> None:
        self.answer: Answer = lambda request: OK
        self.requests: list[bytes] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pool = ThreadPoolExecutor(8)
        self._open: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            sock.settimeout(TIMEOUT_S)
            self._open.append(sock)
            self._pool.submit(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while request := read_message(sock):
                    self.requests.append(request)
                    answer = self.answer(request)
                    if answer is None:
                        return
                    sock.sendall(answer)
            except OSError:
                return

    def hang_up(self) -> None:
        """End every connection that is idle."""
        for sock in self._open:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self.hang_up()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(TIMEOUT_S)
        self._listener.close()
        self._pool.shutdown()


def read_message(sock: socket.socket) -> bytes:
    """A head with its body, whichever way it is framed; empty at the end.

    Unbuffered: what came with it of the next message stays in the socket.
    """
    with sock.makefile("rb", buffering=0) as lines:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = lines.readline()
            if not line:
                return head
            head += line
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            return head + _chunks(sock, lines)
        if b"content-length: " in lower:
            length = int(lower.partition(b"content-length: ")[2].split(b"\r\n")[0])
            return head + _exactly(sock, length)
    return head


def _chunks(sock: socket.socket, lines: SocketIO) -> bytes:
    """Every chunk as it came, and the trailers after the last."""
    body = b""
    while line := lines.readline():
        body += line
        if size_bytes := int(line, 16):
            body += _exactly(sock, size_bytes + 2)
            continue
        while trailer := lines.readline():
            body += trailer
            if trailer == b"\r\n":
                return body
    return body


def _exactly(sock: socket.socket, size_bytes: int) -> bytes:
    """So many bytes, fewer at the end."""
    data = bytearray()
    while len(data) < size_bytes and (more := sock.recv(size_bytes - len(data))):
        data += more
    return bytes(data)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: FaultProxy) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:

        def make() -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)
            return stack.enter_context(sock)

        yield make


def test_heads_pass_as_they_were_written(server: Server, connect: Callable) -> None:
    sock = connect()
    sock.sendall(
        b"GET /b/k%20?x-id=GetObject HTTP/1.1\r\nHOST: s3.example:9000\r\nX-Amz-Meta-A:   b  c\r\n"
        b"authorization: AWS4 x\r\n\r\n"
    )
    assert read_message(sock) == OK
    [request] = server.requests
    assert request == (
        b"GET /b/k%20?x-id=GetObject HTTP/1.1\r\nHOST: s3.example:9000\r\nX-Amz-Meta-A: b  c\r\n"
        b"authorization: AWS4 x\r\n\r\n"
    )


def test_one_connection_carries_many_requests_on_both_sides(
    server: Server, connect: Callable
) -> None:
    sock = connect()
    for number in range(5):
        sock.sendall(b"PUT /b/%d HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc" % number)
        assert read_message(sock) == OK
    assert server.connections == 1
    sock.sendall(b"GET /b/1 HTTP/1.1\r\n\r\nGET /b/2 HTTP/1.1\r\n\r\n")  # both at once
    assert read_message(sock) + read_message(sock) == OK + OK


@pytest.mark.parametrize(
    "request_head",
    [b"GET /b/k HTTP/1.1\r\nConnection: close\r\n\r\n", b"GET /b/k HTTP/1.0\r\n\r\n"],
)
def test_a_client_that_wants_the_connection_closed_gets_it_closed(
    connect: Callable, request_head: bytes
) -> None:
    sock = connect()
    sock.sendall(request_head)
    assert b"Connection: close" in read_message(sock)
    assert sock.recv(1) == b""


def test_chunks_and_trailers_pass_in_both_directions(
    server: Server, proxy: FaultProxy, connect: Callable
) -> None:
    server.answer = lambda _: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx-end: 1\r\n\r\n"
    )
    sock = connect()
    sock.sendall(
        b"PUT /b/log/1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nx-amz-checksum-crc32: AAAA\r\n\r\n"
    )
    answer = read_message(sock)
    assert answer.endswith(b"3\r\nabc\r\n0\r\nx-end: 1\r\n\r\n")
    assert b"0\r\nx-amz-checksum-crc32: AAAA\r\n\r\n" in server.requests[0]
    [entry] = proxy.requests()
    assert (entry.in_bytes, entry.out_bytes) == (11, 3)


def test_a_body_that_ends_with_the_connection_passes(server: Server, connect: Callable) -> None:
    def answer(request: bytes) -> bytes | None:
        return b"HTTP/1.1 200 OK\r\n\r\nuntil the end"

    server.answer = answer
    sock = connect()
    sock.sendall(b"GET /b/k HTTP/1.1\r\n\r\n")
    found = b""
    while not found.endswith(b"until the end"):
        found += sock.recv(65536)
    server.hang_up()
    assert b"Connection: close" in found
    assert sock.recv(1) == b""


def test_an_answer_to_head_has_no_body_though_it_has_a_length(
    server: Server, connect: Callable
) -> None:
    server.answer = lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"
    sock = connect()
    for _ in range(2):
        sock.sendall(b"HEAD /b/k HTTP/1.1\r\n\r\n")
        assert sock.recv(65536).endswith(b"Content-Length: 500\r\n\r\n")


def test_the_proxy_invites_a_body_that_waits_for_it(
    server: Server, proxy: FaultProxy, connect: Callable
) -> None:
    sock = connect()
    head = b"PUT /b/k HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    sock.sendall(head)
    assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(b"body")
    assert read_message(sock) == OK
    assert b"Expect" not in server.requests[0]


def test_a_refused_body_is_not_invited(
    server: Server, proxy: FaultProxy, connect: Callable
) -> None:
    proxy.plan = Script(Rule(fault=Fault.refuse()))
    sock = connect()
    sock.sendall(b"PUT /b/k HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
    assert read_message(sock).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert sock.recv(1) == b""
    assert server.requests == []


def test_a_refusal_keeps_the_connection(
    server: Server, proxy: FaultProxy, connect: Callable
) -> None:
    proxy.plan = Script(Rule(fault=Fault.refuse(), nth={1}))
    sock = connect()
    sock.sendall(b"PUT /b/k HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody")
    assert b"<Code>SlowDown</Code>" in read_message(sock)
    sock.sendall(b"PUT /b/k HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody")
    assert read_message(sock) == OK


def test_a_server_that_hung_up_between_requests_is_called_again(
    server: Server, connect: Callable
) -> None:
    sock = connect()
    for expected in (1, 2):
        sock.sendall(b"GET /b/k HTTP/1.1\r\n\r\n")
        assert read_message(sock) == OK
        assert server.connections == expected
        server.hang_up()


def test_a_server_that_does_not_answer_is_not_asked_twice(
    server: Server, proxy: FaultProxy, connect: Callable
) -> None:
    server.answer = lambda _: None
    sock = connect()
    sock.sendall(b"PUT /b/k HTTP/1.1\r\nContent-Length: 2\r\n\r\nab")
    assert ended(sock)
    assert len(server.requests) == 1
    assert proxy.wait_idle(timeout_s=TIMEOUT_S)
    [entry] = proxy.requests()
    assert (entry.status, entry.deliveries, entry.fault) == (0, 1, None)


def test_without_a_server_the_client_is_cut_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with FaultProxy(address) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S) as sock:
            sock.sendall(b"GET /b/k HTTP/1.1\r\n\r\n")
            assert ended(sock)
        assert proxy.count(Verb.GET).requests == 1


def test_a_client_that_leaves_in_the_middle_of_its_body_delivers_nothing(
    server: Server, proxy: FaultProxy, connect: Callable
) -> None:
    sock = connect()
    sock.sendall(b"PUT /b/k HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf")
    while not proxy.count().in_bytes:
        pass
    sock.close()
    assert proxy.wait_idle(timeout_s=TIMEOUT_S)
    [entry] = proxy.requests()
    assert (entry.deliveries, entry.in_bytes, entry.status) == (0, 4, 0)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /b/k HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /b/k HTTP/1.1\r\n folded: x\r\n\r\n",
        b"PUT /b/k HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /b/k HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"PUT /b/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET /b/k HTTP/2.0\r\n\r\n",
        b"x" * 70_000,
    ],
)
def test_nonsense_ends_its_own_connection_and_no_other(
    proxy: FaultProxy, connect: Callable, nonsense: bytes
) -> None:
    good, bad = connect(), connect()
    bad.sendall(nonsense)
    assert ended(bad)
    good.sendall(b"GET /b/k HTTP/1.1\r\n\r\n")
    assert read_message(good) == OK


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_a_large_answer_waits_for_its_reader_and_not_in_the_proxy(
    server: Server, proxy: FaultProxy, connect: Callable
) -> None:
    size_bytes = 64 << 20
    server.answer = lambda _: (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size_bytes + bytes(size_bytes)
    )
    sock = connect()
    sock.sendall(b"GET /b/k HTTP/1.1\r\n\r\n")
    read = 0
    while read < size_bytes // 2:
        read += len(sock.recv(1 << 20))
        assert proxy.count().out_bytes - read < 16 << 20  # the kernel's buffers hold some
    while read < size_bytes:
        read += len(sock.recv(1 << 20))


def test_a_truncated_chunked_answer_lacks_its_last_chunk(
    server: Server, proxy: FaultProxy, connect: Callable
) -> None:
    server.answer = lambda _: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n"
    )
    proxy.plan = Script(
        Rule(fault=Fault.truncate(), nth={1}), Rule(fault=Fault.truncate(fixed_length=True))
    )
    first, second = connect(), connect()
    first.sendall(b"GET /b/k HTTP/1.1\r\n\r\n")
    assert read_to_end(first).endswith(b"2\r\nab\r\n")
    second.sendall(b"GET /b/k HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert read_to_end(second).endswith(b"2\r\nab\r\n0\r\n\r\n")
    assert {entry.fault for entry in proxy.requests()} == {Kind.TRUNCATE}


def read_to_end(sock: socket.socket) -> bytes:
    found = b""
    while more := sock.recv(65536):
        found += more
    return found


@pytest.mark.parametrize("position", [0, 1, 3, 4, 9])
def test_something_is_done_once_and_exactly_there(position: int) -> None:
    pieces = [b"abc", b"", b"defg", b"hij"]
    done = list(act_at(iter(pieces), lambda _: position, lambda rest: b"|" + rest))
    text = b"".join(pieces)
    assert b"".join(done) == text[:position] + b"|" + text[position:]


def test_a_body_that_is_too_short_is_left_alone() -> None:
    assert list(act_at(iter([b"abc"]), lambda _: 3, lambda _: b"|")) == [b"abc"]
    assert list(act_at(iter([]), lambda _: 0, lambda _: b"|")) == []


@pytest.mark.parametrize("upstream", ["", "localhost", "http://localhost", ":9000"])
def test_an_upstream_that_is_no_address_is_refused(upstream: str) -> None:
    with pytest.raises(SettingError, match="host:port"):
        FaultProxy(upstream)


def test_a_proxy_starts_once(server: Server) -> None:
    proxy = FaultProxy(server.address)
    with proxy:
        assert repr(proxy.port) in repr(proxy)
        with pytest.raises(SettingError, match="before"):
            proxy.start()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)
