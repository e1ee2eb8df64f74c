"""How large the block cache is where nobody said: by the host, never over what anybody allows."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from statebackend import system
from statebackend.rocks.cache_memory import CACHE_MAX_BYTES, cache_bytes
from statebackend.rocks.rocksdb_options import RocksSettings

GB, MB = 1 << 30, 1 << 20


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets memory, cores and the process's own limit."""

    def is_of(memory: int, cores: int, own: int | None = None) -> None:
        cache_bytes.cache_clear()
        monkeypatch.setattr(system, "memory_bytes", lambda: memory)
        monkeypatch.setattr(system, "cores", lambda: cores)
        monkeypatch.setattr(system, "own_memory_limit_bytes", lambda: own)

    yield is_of
    cache_bytes.cache_clear()


@pytest.mark.parametrize(
    ("memory", "cores", "workers", "expected"),
    [
        (8 * GB, 4, 4, 256 * MB),
        (8 * GB, 8, 1, 128 * MB),  # a worker for each core at least
        (8 * GB, 4, 16, 64 * MB),
        (1 * GB, 8, 8, 64 * MB),  # never less
        (512 * GB, 8, 8, CACHE_MAX_BYTES),
    ],
)
def test_an_eighth_of_the_host_is_for_all_workers_caches(
    host: Any, memory: int, cores: int, workers: int, expected: int
) -> None:
    host(memory, cores)
    assert cache_bytes(workers, CACHE_MAX_BYTES) == expected


def test_a_smaller_limit_of_the_executor_or_the_process_counts(host: Any) -> None:
    host(64 * GB, 4)
    assert cache_bytes(4, 100 * MB) == 100 * MB
    host(64 * GB, 4, own=600 * MB)
    assert cache_bytes(4, CACHE_MAX_BYTES) == 150 * MB


def test_a_size_that_was_set_is_taken_as_it_is(host: Any) -> None:
    host(64 * GB, 4)
    assert RocksSettings(block_cache_bytes=5 * MB).cache_bytes == 5 * MB
    assert RocksSettings(block_cache_bytes=0, workers=4).cache_bytes == CACHE_MAX_BYTES


def test_this_host_says_its_memory_and_cores() -> None:
    assert 128 * MB < system.memory_bytes() < 1 << 50
    assert system.cores() >= 1


def test_a_limit_of_spark_on_this_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (3 * GB, resource.RLIM_INFINITY))
    assert system.own_memory_limit_bytes() == 3 * GB
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda what: unlimited)
    assert system.own_memory_limit_bytes() is None


def test_the_limit_of_a_container_is_its_memory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, none = tmp_path / "memory.max", tmp_path / "missing"
    monkeypatch.setattr(system, "_MEMORY_LIMITS", (str(limit), str(none)))
    limit.write_text("268435456\n")
    assert system.memory_bytes() == 256 * MB
    limit.write_text("max\n")
    assert system.memory_bytes() > 256 * MB


def test_a_containers_share_of_time_counts_as_its_cores(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(system, "_CPU_QUOTA", str(quota))
    assert system.cores() == 64
    for text, cores in (("max 100000\n", 64), ("400000 100000\n", 4), ("50000 100000\n", 1)):
        quota.write_text(text)
        assert system.cores() == cores
