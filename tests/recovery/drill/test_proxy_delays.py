"""The fault proxy stalls, slows or holds requests, and delivers them late or never.

Every test runs over HTTP and over TLS, where boto3 sends other requests (chunks with a trailer).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError, ResponseStreamingError

from recovery.drill import Fault, FaultProxy, Kind
from tests.recovery.drill.proxied import BODY, CONNECTION_LOST, Stored, always, create, first, get

pytestmark = pytest.mark.full  # waits for answers that are held back


# In the first case nothing needs to come within the time.
@pytest.mark.parametrize(("where", "read_timeout_s"), [("before", 0.5), ("response", 2.0)])
def test_a_stalled_read_runs_into_the_clients_timeout(
    proxy: FaultProxy,
    make_client: Callable[..., Any],
    bucket: str,
    where: Any,
    read_timeout_s: float,
) -> None:
    patient = make_client(proxy)
    create(patient, bucket)
    proxy.plan = first(Fault.stall(600, where))
    proxy.reset()
    with pytest.raises((ReadTimeoutError, ResponseStreamingError), match=r"[Tt]imed? ?out"):
        get(make_client(proxy, read_timeout_s=read_timeout_s), bucket)
    [entry] = proxy.requests()
    assert (entry.fault, entry.duration_s) == (Kind.STALL, None)
    assert entry.out_bytes == (len(BODY) // 2 if where == "response" else 0)
    assert get(patient, bucket) == BODY


def test_a_stalled_upload_is_not_there(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str, stored: Stored
) -> None:
    client = make_client(proxy, read_timeout_s=0.3)
    proxy.plan = first(Fault.stall(600, "request"))
    with pytest.raises(ReadTimeoutError):
        create(client, bucket)
    proxy.stop()  # must not wait for the stall
    assert stored("log/1") is None


def test_a_short_stall_only_takes_time(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    for where in ("before", "request"):
        proxy.plan = always(Fault.stall(0.2, where))
        create(client, bucket, f"log/{where}")
        assert stored(f"log/{where}") == BODY
    assert proxy.wait_idle(timeout_s=10)
    assert all((entry.duration_s or 0) >= 0.2 for entry in proxy.requests())


def test_a_slow_request_keeps_to_its_rate(proxy: FaultProxy, client: Any, bucket: str) -> None:
    create(client, bucket)
    proxy.plan = always(Fault.slow(50_000))
    assert get(client, bucket) == BODY
    create(client, bucket, "log/2")
    assert proxy.wait_idle(timeout_s=10)
    slow = proxy.requests()[1:]
    assert all((entry.duration_s or 0) >= len(BODY) / 50_000 for entry in slow)
    assert [entry.fault for entry in slow] == [Kind.SLOW, Kind.SLOW]


def test_latency_and_bandwidth_hold_for_every_request_and_are_no_faults(
    proxy: FaultProxy, client: Any, bucket: str
) -> None:
    proxy.set_pace(latency_s=0.1, bytes_per_s=100_000)
    create(client, bucket)
    proxy.set_pace(latency_s=600)
    proxy.set_pace()
    assert get(client, bucket) == BODY  # the client would not wait so long
    assert proxy.wait_idle(timeout_s=10)
    slow, _ = proxy.requests()
    assert (slow.duration_s or 0) >= 0.1 + len(BODY) / 100_000
    assert proxy.count().faulted == 0


def test_a_held_put_lands_after_its_client_gave_up(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str, stored: Stored
) -> None:
    client = make_client(proxy, read_timeout_s=0.3)
    proxy.plan = first(Fault.hold())
    with pytest.raises(ReadTimeoutError):
        create(client, bucket)
    assert proxy.wait_held(1, timeout_s=10)
    assert proxy.held() == [1]
    assert stored("log/1") is None
    assert proxy.release() == 1
    assert proxy.wait_idle(timeout_s=10)
    assert stored("log/1") == BODY
    [entry] = proxy.requests()
    assert (entry.fault, entry.deliveries) == (Kind.HOLD, 1)


def test_a_held_create_that_comes_too_late_changes_nothing(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str, stored: Stored
) -> None:
    client = make_client(proxy, read_timeout_s=0.3)
    proxy.plan = first(Fault.hold())
    with pytest.raises(ReadTimeoutError):
        create(client, bucket)
    create(make_client(proxy), bucket, body=b"the successor's")
    proxy.release(proxy.held()[0])
    assert proxy.wait_idle(timeout_s=10)
    assert stored("log/1") == b"the successor's"


def test_a_held_request_is_answered_if_its_client_still_waits(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    proxy.plan = first(Fault.hold())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(create, client, bucket)
        assert proxy.wait_held(timeout_s=10)
        assert proxy.release(number=99) == 0
        assert proxy.release(number=1) == 1
        waiting.result(10)
    assert stored("log/1") == BODY


def test_what_is_held_when_the_proxy_stops_is_never_delivered(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    proxy.plan = first(Fault.hold())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(create, client, bucket)
        assert proxy.wait_held(timeout_s=10)
        proxy.stop()
        with pytest.raises(CONNECTION_LOST):
            waiting.result(10)
    assert stored("log/1") is None


def test_while_down_nothing_passes_and_all_of_it_counts(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    create(client, bucket)
    proxy.go_down()
    for _ in range(3):
        with pytest.raises(CONNECTION_LOST):
            get(client, bucket)
    with pytest.raises(CONNECTION_LOST):
        create(client, bucket, "log/2")
    proxy.come_up()
    assert get(client, bucket) == BODY
    assert stored("log/2") is None
    faults = [entry.fault for entry in proxy.requests()]
    assert faults == [None, Kind.DOWN, Kind.DOWN, Kind.DOWN, Kind.DOWN, None]
