"""A job's folder with a long history, written as its driver and its cleaner would have left it."""

from __future__ import annotations

import random

import msgspec
from blake3 import blake3
from pyspark.sql.types import StructType

from snapshot.formats.delta import encode_delta
from snapshot.formats.epoch_figures import RecordFigures, SubtaskColumns, encode_figures
from snapshot.formats.history_object import RecordSummary, encode_history
from snapshot.formats.lineage_digest import chain
from snapshot.formats.record import Manifest, SliceEntry
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.operators import operators_setting
from snapshot.storage.object_store import ObjectStore
from statebackend.operators.declared_states import StateDeclaration
from statebackend.system import new_id

__all__ = ["write_history"]

OPERATOR = "counter"
_STARTED_MS = 1_795_000_000_000
_EVERY_MS = 10_000
_AN_OBJECT = 64


def write_history(store: ObjectStore, job: str, *, subtasks: int, epochs: int) -> None:
    """Write a job of so many epochs: the newest in records, the others in objects of 64."""
    log = CommitLog(store, job=job, writer="driver:1", new_id=new_id)
    tenure = log.claim(query_id="query", run=new_id())
    chance = random.Random(f"{job} {subtasks}")
    first = max(0, epochs - _AN_OBJECT)
    for begin in range(0, first, _AN_OBJECT):
        numbers = range(begin, min(begin + _AN_OBJECT, first))
        summaries = [_summary(number, subtasks, chance) for number in numbers]
        name, data = encode_history(summaries)
        store.put(name, [data])
    oldest = tenure._next = tenure.sequence + 1 + first  # as if those records had been there
    lineage = OperatorLineage.new(
        OPERATOR,
        job_id=tenure.job_id,
        parallelism=subtasks,
        max_parallelism=max(128, subtasks),
        first_epoch=first,
    )
    value = StateDeclaration(name="count", kind="value", value_schema=_schema("n", "long"))
    schemas = {"": _schema("user", "string"), "count": msgspec.json.encode(value).decode()}
    data = encode_delta([b"key"], [b"value"]).data
    digest = blake3(data).hexdigest()
    chains = [one.chain_at(first - 1) or "" for one in lineage.subtasks]
    for number in range(first, epochs):
        figures, columns = _figures(number, subtasks, chance)
        slices = []
        for subtask, known in enumerate(lineage.subtasks):
            chains[subtask] = chain(bytes.fromhex(chains[subtask]), bytes.fromhex(digest)).hex()
            timings = {"read": 30.0, "process": float(columns.acked_ms[subtask] - 40)}
            slices.append(
                SliceEntry(
                    operator=OPERATOR,
                    subtask=subtask,
                    kind="delta",
                    epoch=number,
                    key_group_start=known.key_groups.start,
                    key_group_end=known.key_groups.end,
                    attempt=0,
                    rows=1,
                    size_bytes=len(data),
                    digest=digest,
                    chain=chains[subtask],
                    timings_ms={**timings, "snapshot": 8.0},
                )
            )
        manifest = Manifest(
            kind="checkpoint",
            job="",
            job_id="",
            generation=0,
            sequence=0,
            writer="",
            write_id="",
            oldest_needed=oldest,
            cleaned_below=oldest,
            operator=OPERATOR,
            epoch=number,
            stamp_ms=_STARTED_MS + number * _EVERY_MS,
            parallelism=subtasks,
            max_parallelism=max(128, subtasks),
            first_epoch=first,
            slices=slices,
            states={"count": 0},
            schemas=schemas,
            settings=operators_setting({OPERATOR: first}),
            figures=encode_figures(figures, columns),
        )
        log.append(tenure, manifest, [data] * subtasks)


def _schema(name: str, kind: str) -> str:
    return str(StructType().add(name, kind).json())


def _figures(
    number: int, subtasks: int, chance: random.Random
) -> tuple[RecordFigures, SubtaskColumns]:
    acked = [round(chance.uniform(150, 260)) for _ in range(subtasks)]
    slow = subtasks * 2 // 3
    acked[slow] = 4 * acked[slow] if subtasks > 1 else acked[slow]
    ordered = sorted(acked)
    figures = RecordFigures(
        started_ms=_STARTED_MS + number * _EVERY_MS,
        acks_ms=float(ordered[-1]),
        median_ms=float(ordered[len(ordered) // 2]),
        p95_ms=float(ordered[len(ordered) * 95 // 100]),
        slowest=slow,
        slowest_on=f"{slow % 8} on 10.0.3.{10 + slow % 8}",
        delta_bytes=2_000 * subtasks,
        delta_rows=100 * subtasks,
        phases_ms={"read": 30.0, "process": float(ordered[-1] - 40), "snapshot": 8.0},
        counts={"rows": 1_000 * subtasks, "stored_bytes": (3 << 20) * subtasks},
    )
    columns = SubtaskColumns(
        executors=[(str(n), f"10.0.3.{10 + n}") for n in range(8)],
        ran_on=[n % 8 for n in range(subtasks)],
        begun_ms=[n % 20 for n in range(subtasks)],
        acked_ms=acked,
        rows=[4_000 if n == slow else 1_000 for n in range(subtasks)],
    )
    return figures, columns


def _summary(number: int, subtasks: int, chance: random.Random) -> RecordSummary:
    figures, _ = _figures(number, min(subtasks, 40), chance)
    return RecordSummary(
        sequence=number + 1,
        generation=1,
        operator=OPERATOR,
        epoch=number,
        parallelism=subtasks,
        query_id="query",
        stamp_ms=_STARTED_MS + number * _EVERY_MS,
        figures=msgspec.structs.replace(figures, delta_rows=100 * subtasks),
    )
