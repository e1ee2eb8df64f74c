"""The files of a new location, for a query that had Spark's own operators: where offsets stand."""

from __future__ import annotations

import pytest
from blake3 import blake3

from recovery.savepoints.savepoint import SPARK_FOLDER, Savepoint, SavepointFile
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import CheckpointLocationError, CorruptionError, SettingError
from statebackend.spark.frames.heartbeat import SOURCE_NAME
from statebackend.spark.frames.repeatable_sources import Source
from statebackend.spark.start.location_from_savepoint import location_files

FILES = {
    "offsets/4": b'v1\n{"batchWatermarkMs":7}\n{"logOffset":1}\n{"logOffset":8}',
    "commits/4": b'v1\n{"nextBatchWatermarkMs":7}',
    "sources/0/1": b"first",
    "sources/1/8": b"second",
}


BEAT = SOURCE_NAME


def saved(store: MemoryStore, files: dict[str, bytes] = FILES) -> Savepoint:
    described = []
    for name, body in files.items():
        store.put(f"{SPARK_FOLDER}{name}", [body])
        digest = blake3(body).hexdigest()
        described.append(SavepointFile(name=name, size_bytes=len(body), digest=digest))
    return Savepoint(
        id="a",
        uri="",
        job="a",
        job_id="a",
        job_uri="",
        query_id="q",
        location="",
        epoch=4,
        stamp_ms=1,
        watermark_ms=None,
        created_ms=1,
        operators=[],
        records=1,
        objects=0,
        size_bytes=0,
        spark=described,
        next_watermark_ms=7,
    )


def reads(*names: str) -> list[Source]:
    """A query's sources; those of one name are one that is read in several places."""
    numbers: dict[str, int] = {}
    found = [(name, numbers.setdefault(name, len(numbers))) for name in names]
    return [Source(BEAT if name.startswith(BEAT) else name, "", "", n) for name, n in found]


def made(
    sources: list[Source] | None, files: dict[str, bytes] = FILES
) -> tuple[list[str], dict[str, str]]:
    """The offsets of the plan, and the logs of sources by the names of what they are copied of."""
    store = MemoryStore()
    found = location_files(saved(store, files), sources, store)
    plan = found["offsets/4"].body
    assert plan is not None
    logs = {name: one.copied for name, one in found.items() if name.startswith("sources/")}
    assert {found[new].digest for new in logs} <= {
        blake3(body).hexdigest() for body in files.values()
    }
    return plan.decode().split("\n")[2:], logs


def with_plan(*offsets: str, **logs: bytes) -> dict[str, bytes]:
    plan = "\n".join(['v1\n{"batchWatermarkMs":7}', *offsets]).encode()
    return {"offsets/4": plan, **{f"sources/{n[1:]}/1": body for n, body in logs.items()}}


A, B, C = '{"logOffset":1}', '{"logOffset":8}', '{"topic":{"0":3}}'


@pytest.mark.parametrize(
    ("sources", "offsets", "logs"),
    [
        (("a", "b"), [A, B], ("0", "1")),
        ((BEAT, "a", "b"), ["-", A, B], ("1", "2")),
        (("a", BEAT, "b"), [A, "-", B], ("0", "2")),
        (("a", "b", BEAT), [A, B, "-"], ("0", "1")),
        (("a", BEAT, "b", f"{BEAT} 2"), [A, "-", B, "-"], ("0", "2")),
        ((BEAT, "a", f"{BEAT} 2", "b"), ["-", A, "-", B], ("1", "3")),
        ((BEAT, "a", BEAT, "b"), ["-", A, "-", B], ("1", "2")),  # one, in two places
    ],
)
def test_each_heartbeat_has_its_line_and_moves_what_comes_after_it(
    sources: tuple[str, ...], offsets: list[str], logs: tuple[str, str]
) -> None:
    placed, copied = made(reads(*sources))
    assert placed == offsets
    assert copied == {f"sources/{logs[0]}/1": "sources/0/1", f"sources/{logs[1]}/8": "sources/1/8"}


def test_a_source_in_two_places_has_two_offsets_and_one_log() -> None:
    files = with_plan(A, A, B, _0=b"first", _1=b"second")
    offsets, logs = made(reads("a", BEAT, "a", f"{BEAT} 2", "b"), files)
    assert offsets == [A, "-", A, "-", B]
    assert logs == {"sources/0/1": "sources/0/1", "sources/3/1": "sources/1/1"}


@pytest.mark.parametrize(
    ("sources", "files"),
    [
        (("a", BEAT), FILES),  # one too few
        (("a", "b", "c"), FILES),
        (("a", BEAT, "a"), FILES),  # it was two
        (("a", "b", BEAT), with_plan(A, A, _0=b"first")),  # it was one in two places
        (("a", "a"), with_plan(C, C, _0=b"first", _1=b"second")),
    ],
)
def test_other_sources_are_refused(sources: tuple[str, ...], files: dict[str, bytes]) -> None:
    with pytest.raises(CheckpointLocationError, match="not the query's"):
        made(reads(*sources), files)


def test_sources_must_be_known() -> None:
    with pytest.raises(SettingError, match="must be known"):
        made(None)


def test_a_damaged_plan_is_refused() -> None:
    store = MemoryStore()
    savepoint = saved(store)
    store.put(f"{SPARK_FOLDER}offsets/4", [b"v1\n{}\n-\n-"])
    with pytest.raises(CorruptionError, match="offsets/4"):
        location_files(savepoint, reads("a", "b"), store)
