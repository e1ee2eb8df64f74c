"""The channels of continuous mode: `python -m bench exchange`.

Rows of three columns (two int64, one double) through one channel: between threads, and over
loopback from a process of its own. How many a second, what a batch costs each side in processor
time, and how long one is under way at a low rate, from before it is emitted to after it is polled.
The same with TLS. Then several channels between the same two processes, each a stream of its own;
what dealing rows to receivers by key group costs; a request to the driver, with TLS and without.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from bench.machine import ROOT, busy_share
from snapshot.barriers.barrier import EndOfInput
from snapshot.protocol.messages import PROTOCOL
from statebackend.continuous.exchange.channel import ChannelSender, LocalChannel
from statebackend.continuous.exchange.channel_client import ExchangeClient
from statebackend.continuous.exchange.channel_messages import Address, Identity
from statebackend.continuous.exchange.channel_server import ExchangeServer
from statebackend.continuous.exchange.inbox import Inbox
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.exchange.partitioner import by_key_group, rebalance
from statebackend.rpc.driver_client import Client
from statebackend.rpc.driver_server import Server
from statebackend.rpc.envelope import Call
from statebackend.rpc.tls import self_signed

__all__ = ["exchange", "exchange_text"]

_IDENTITY = Identity(job="bench", run="1", generation=1, token="bench")
_CAPACITY_BYTES = 4 << 20
_BUFFER_BYTES = 256 << 10
_RATE = 100  # messages a second where latency is measured


def exchange(*, batches: int, repeats: int, seconds: float, progress: Any) -> Any:
    """Everything above; ``progress`` is called with lines."""
    found: dict[str, Any] = {
        "capacity_bytes": _CAPACITY_BYTES,
        "buffer_bytes": _BUFFER_BYTES,
        "busy_share_before": busy_share(1.0),
        "throughput": [],
        "latency": [],
    }
    for kind in ("local", "remote", "tls"):
        for rows, more in ((10_000, 1), (1_000, 5), (100, 25)):
            work = {"rows": rows, "batches": batches * more, "channels": 1}
            taken = [_throughput(kind, work) for _ in range(repeats)]
            best = max(taken, key=lambda one: one["rows_per_s"])
            found["throughput"].append(best | {"all": [one["rows_per_s"] for one in taken]})
            progress(f"exchange: {kind}, {rows} rows: {best['rows_per_s'] / 1e6:.1f} M rows/s")
        for rows in (1, 1000):
            taken = _latency(kind, rows, seconds)
            found["latency"].append(taken)
            progress(f"exchange: {kind}, {rows} rows: p99 {taken['p99_ms']:.2f} ms")
    for channels in (4, 16):
        work = {"rows": 10_000, "batches": batches, "channels": channels}
        found["throughput"].append(_throughput("remote", work))
    found["dealing"] = [_dealing(receivers) for receivers in (2, 8, 64)]
    found["requests"] = [_requests(tls) for tls in (False, True)]
    found["busy_share_after"] = busy_share(1.0)
    return found


def _batch(rows: int) -> pa.RecordBatch:
    keys = (np.arange(rows) * 2654435761) % 100_003
    columns = [keys, np.arange(rows), np.arange(rows) / 7]
    return pa.RecordBatch.from_arrays([pa.array(c) for c in columns], names=["key", "n", "x"])


@contextmanager
def _wired(kind: str, work: dict[str, Any]) -> Iterator[tuple[Inbox, Any]]:
    """An inbox, and what is to be called for what the sender says about itself in the end."""
    inbox = Inbox(work["channels"], capacity_bytes=_CAPACITY_BYTES)
    said: dict[str, Any] = {}
    if kind == "local":
        channels = [LocalChannel(inbox, i) for i in range(work["channels"])]
        thread = threading.Thread(target=lambda: said.update(_send(channels, work)))
        thread.start()
        yield inbox, lambda: thread.join() or said
        inbox.close()
        return
    tls = self_signed() if kind == "tls" else None
    server = ExchangeServer(_IDENTITY, host="127.0.0.1", tls=tls)
    told = work | {"certificate": tls.certificate.decode() if tls else ""}
    for i in range(work["channels"]):
        server.expect(_address(i), inbox, i)
    command = [sys.executable, "-m", "bench.exchange", server.location, json.dumps(told)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield inbox, lambda: json.loads(child.communicate()[0])
    child.wait(30)
    inbox.close()
    server.close()


def _address(channel: int) -> Address:
    return Address(vertex="bench", subtask=0, channel=channel)


def _send(channels: Any, work: dict[str, Any]) -> dict[str, Any]:
    """The sender's side, in a thread or a process of its own."""
    senders: list[ChannelSender] = list(channels)
    low_rate = "seconds" in work
    outbox = Outbox(
        senders,
        rebalance(len(senders)),
        buffer_bytes=_BUFFER_BYTES,
        buffer_timeout_s=0 if low_rate else 0.01,
    )
    batch = _batch(work["rows"])
    began_s, began_cpu_s = time.monotonic(), time.thread_time()
    if low_rate:
        for i in range(int(work["seconds"] * _RATE)):
            time.sleep(max(0.0, began_s + i / _RATE - time.monotonic()))
            stamps = pa.array(np.full(work["rows"], time.monotonic_ns()))
            outbox.emit(batch.set_column(1, "n", stamps))
    else:
        for _ in range(work["batches"]):
            outbox.emit(batch)
    outbox.send(EndOfInput())
    outbox.flush()
    cpu_s = time.thread_time() - began_cpu_s
    messages = sum(sender.sent for sender in senders)
    outbox.close()
    return {"cpu_s": cpu_s, "blocked_s": outbox.blocked_s, "messages": messages}


def _throughput(kind: str, work: dict[str, Any]) -> dict[str, Any]:
    with _wired(kind, work) as (inbox, said):
        rows, early, ends, began_s, began_cpu_s = 0, 0, 0, 0.0, 0.0
        while ends < work["channels"]:
            taken = inbox.poll(60)
            assert taken is not None
            if isinstance(taken[1], EndOfInput):
                ends += 1
                continue
            if not began_s:  # the sender has started; what it has sent by now does not count
                began_s, began_cpu_s = time.monotonic(), time.process_time()
                early = rows = taken[1].num_rows  # type: ignore[union-attr]
                continue
            rows += taken[1].num_rows  # type: ignore[union-attr]
        spent_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        sender = said()
    assert rows == work["rows"] * work["batches"]
    rows -= early
    return {
        "kind": kind,
        **work,
        "rows_per_s": round(rows / spent_s),
        "messages": sender["messages"],
        "sender_us_a_message": round(sender["cpu_s"] / sender["messages"] * 1e6, 1),
        "receiver_us_a_message": round(cpu_s / sender["messages"] * 1e6, 1),
        "sender_blocked_share": round(sender["blocked_s"] / spent_s, 2),
    }


def _latency(kind: str, rows: int, seconds: float) -> dict[str, Any]:
    work = {"rows": rows, "seconds": seconds, "channels": 1}
    with _wired(kind, work) as (inbox, said):
        took_ms: list[float] = []
        while True:
            taken = inbox.poll(60)
            assert taken is not None
            if isinstance(taken[1], EndOfInput):
                break
            sent_ns = taken[1].column(1)[0].as_py()  # type: ignore[union-attr]
            took_ms.append((time.monotonic_ns() - sent_ns) / 1e6)
        said()
    cuts = statistics.quantiles(took_ms[_RATE // 2 :], n=1000)  # without the first half second
    return {
        "kind": kind,
        "rows": rows,
        "a_second": _RATE,
        "p50_ms": round(cuts[499], 3),
        "p99_ms": round(cuts[989], 3),
        "p999_ms": round(cuts[998], 3),
    }


def _dealing(receivers: int) -> dict[str, Any]:
    batch, deal = _batch(10_000), by_key_group([0], receivers, 1024)
    took_s = []
    for _ in range(50):
        began_s = time.perf_counter()
        deal(batch)
        took_s.append(time.perf_counter() - began_s)
    best_s = min(took_s)
    return {
        "receivers": receivers,
        "us_a_batch": round(best_s * 1e6, 1),
        "rows_per_s": round(batch.num_rows / best_s),
    }


class _Echo:
    """A session that answers what it is asked."""

    def call(self, kind: str, body: bytes) -> bytes:
        return body


def _requests(tls: bool) -> dict[str, Any]:
    """One after the other, to a server in this process."""
    own = self_signed() if tls else None
    server = Server(bind="127.0.0.1", advertised="127.0.0.1", tls=own)
    endpoint = server.add("bench", "token", _Echo())  # type: ignore[arg-type]
    client = Client(endpoint.location, endpoint.certificate)
    found: dict[str, Any] = {"tls": tls}
    for size in (1_000, 1_000_000):
        call = Call(protocol=PROTOCOL, job="bench", session="bench", kind="echo", body=b"x" * size)
        took_ms = []
        for _ in range(1000 if size < 10_000 else 100):
            began_s = time.perf_counter()
            client.call(endpoint, call, timeout_s=60)
            took_ms.append((time.perf_counter() - began_s) * 1000)
        found[f"p50_ms_of_{size}_bytes"] = round(statistics.median(took_ms[10:]), 3)
    server.shutdown()
    return found


def exchange_text(found: Any) -> str:
    """As a table."""
    lines = [
        "channel           rows    M rows/s  sender us  receiver us  blocked",
        *(
            f"{one['kind']:7} x {one['channels']:2} {one['rows']:9,}"
            f" {one['rows_per_s'] / 1e6:11.2f} {one['sender_us_a_message']:10.1f}"
            f" {one['receiver_us_a_message']:12.1f} {one['sender_blocked_share']:8.0%}"
            for one in found["throughput"]
        ),
        f"(us of processor time for a message; {found['busy_share_before']:.0%} busy before)",
        "",
        f"latency at {_RATE} a second   rows   p50 ms   p99 ms  p99.9 ms",
        *(
            f"{one['kind']:22} {one['rows']:6,} {one['p50_ms']:8.2f} {one['p99_ms']:8.2f}"
            f" {one['p999_ms']:9.2f}"
            for one in found["latency"]
        ),
        "",
        *(
            f"dealing 10,000 rows to {one['receivers']} receivers: {one['us_a_batch']} us,"
            f" {one['rows_per_s'] / 1e6:.0f} M rows/s"
            for one in found["dealing"]
        ),
        "",
        *(
            f"a request to the driver, {'with' if one['tls'] else 'without'} TLS:"
            f" {one['p50_ms_of_1000_bytes']} ms with 1 kB each way,"
            f" {one['p50_ms_of_1000000_bytes']} ms with 1 MB"
            for one in found["requests"]
        ),
    ]
    return "\n".join(lines)


def _main(location: str, work: dict[str, Any]) -> None:
    certificate = work["certificate"].encode()
    client = ExchangeClient(_IDENTITY, tls=bool(certificate))
    channels = [client.connect(location, _address(i), certificate) for i in range(work["channels"])]
    print(json.dumps(_send(channels, work)))
    client.close()


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
