"""Requests to the object store: `python -m bench requests`.

The counter in 200 subtasks, each of which changes a few hundred bytes in each epoch, on an S3
server behind a proxy that counts. Then a restart without any local copy. For comparison: the files
that Spark itself writes into the checkpoint location for the query, and the files that Spark's own
state store writes for a stateful query of as many partitions.
"""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from bench.data import FILES_PER_BATCH, write_batches
from bench.query import Job, files_below, run_to_end, stream
from bench.s3 import place
from bench.side import session
from recovery.drill.proxy.fault_proxy import FaultProxy
from snapshot.formats.record import FOOTER_BYTES, record_name
from snapshot.log.commit_log import CommitLog
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.settings import SETTINGS

__all__ = ["requests", "requests_text"]

_WARM = 2


def requests(*, subtasks: int, epochs: int, spark_batches: int, work: Path, progress: Any) -> Any:
    """Everything above; ``progress`` is called with lines."""
    every = {"base_every_epochs": epochs // 4, "clean_every_epochs": epochs * 5 // 16}
    settings = {**every, "clean_min_age_s": 0.0}
    keys = subtasks * 10
    source = write_batches(work / "in", keys=keys, rows=keys, full=epochs)
    later = write_batches(work / "later", keys=keys, rows=keys, full=epochs + 2)
    spark = session({"side": "requests", "work": str(work), "partitions": subtasks})
    found: dict[str, Any] = {"subtasks": subtasks, "epochs": epochs, "settings": settings}
    try:
        with place(work / "s3") as server, FaultProxy(server.address, entries_max=50_000) as proxy:
            job = Job(spark, work, source, server.uri("requests"), proxy.url, subtasks, settings)
            found["run"] = _run(job, proxy, epochs, progress)
            found["run"] |= _records(job, server)
            _add_batch(later, source, epochs)
            shutil.rmtree(job.local)
            found["restart_durable"] = _restart(job, server, proxy)
            progress(f"restart without local copies: {found['restart_durable']}")
            _add_batch(later, source, epochs + 1)
            found["restart_local"] = _restart(job, server, proxy)
            progress(f"restart with local copies: {found['restart_local']}")
        found["spark"] = _spark_files(spark, later, work, spark_batches, subtasks, progress)
    finally:
        spark.stop()
    found["at_defaults"] = _at_defaults(found["run"])
    return found


def _total(proxy: FaultProxy) -> dict[str, int]:
    return {f"{verb} {group}": one.requests for (verb, group), one in proxy.counts().items()}


def _less(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {k: n - before.get(k, 0) for k, n in sorted(after.items()) if n > before.get(k, 0)}


def _run(job: Job, proxy: FaultProxy, epochs: int, progress: Any) -> dict[str, Any]:
    seen: list[tuple[dict[str, int], int, float]] = []

    def after_batch(batch: int) -> None:
        sent_bytes = proxy.count().in_bytes
        seen.append((_total(proxy), sent_bytes, time.perf_counter()))
        if batch % 4 == 0:
            progress(f"requests: epoch {batch + 1}/{epochs}, {sum(seen[-1][0].values())} requests")

    started_s = time.perf_counter()
    backend, _ = job.run(after_batch)
    counted = epochs - _WARM
    first, last = seen[_WARM - 1], seen[-1]
    end = _total(proxy)  # a cleaning may have gone on after the last batch
    parts = _less(end, first[0])
    by_epoch = [sum(_less(b[0], a[0]).values()) for a, b in itertools.pairwise(seen[1:])]
    epochs_known = backend.progress().epochs
    files = files_below(job.checkpoint)
    return {
        "counted_epochs": counted,
        "requests_by_epoch": by_epoch,
        "requests": parts,
        "requests_an_epoch": round(sum(parts.values()) / counted, 3),
        "epochs_with_one_request": sum(n == 1 for n in by_epoch),
        "commits_an_epoch": round(parts.get("put_if log/", 0) / counted, 3),
        "cleanings": parts.get("list log/", 0),
        "inline_bases": sum(e.bases for e in epochs_known if e.epoch >= _WARM),
        "delta_bytes_a_subtask": round(
            sum(e.delta_bytes for e in epochs_known) / len(epochs_known) / job.partitions
        ),
        "sent_bytes_an_epoch": round((last[1] - first[1]) / counted),
        "epoch_s": round((last[2] - first[2]) / counted, 3),
        "start_to_first_epoch_s": round(seen[0][2] - started_s, 2),
        "start_requests": sum(seen[0][0].values()),
        "spark_checkpoint_files": files,
        "spark_checkpoint_files_a_batch": round(sum(files.values()) / epochs, 2),
    }


def _log(job: Job, server: Any) -> tuple[Any, CommitLog]:
    store = open_store(f"{job.uri}/bench", new_id=system.new_id, options=server.options())
    return store, CommitLog(store, job="bench", writer="bench", new_id=system.new_id)


def _records(job: Job, server: Any) -> dict[str, Any]:
    store, log = _log(job, server)
    manifests = [m for m in log.manifests() if m.kind == "checkpoint"]
    sizes = []
    for manifest in manifests:
        footer, total = store.get_tail(record_name(manifest.sequence), FOOTER_BYTES)
        sizes.append((int.from_bytes(footer[20:24], "little"), total))
    return {
        "records_kept": len(manifests),
        "manifest_bytes_max": max(size for size, _ in sizes),
        "record_bytes_max": max(total for _, total in sizes),
        "records_with_bases": sum(any(s.kind != "delta" for s in m.slices) for m in manifests),
    }


def _add_batch(later: Path, source: Path, batch: int) -> None:
    for index in range(batch * FILES_PER_BATCH, (batch + 1) * FILES_PER_BATCH):
        name = f"{index:05d}.parquet"
        shutil.copy2(later / name, source / name)


def _restart(job: Job, server: Any, proxy: FaultProxy) -> dict[str, Any]:
    _, log = _log(job, server)
    needed = [m for m in log.manifests() if m.kind == "checkpoint"]
    proxy.reset()
    seen: list[tuple[dict[str, int], float]] = []
    started_s = time.perf_counter()
    backend, _ = job.run(lambda batch: seen.append((_total(proxy), time.perf_counter())))
    restores = backend.restores()
    sources: dict[str, int] = {}
    for one in restores:
        sources[one.source] = sources.get(one.source, 0) + 1
    return {
        "records_since_oldest_base": len(needed),
        "requests": sum(seen[0][0].values()),
        "beyond_the_records": sum(seen[0][0].values()) - len(needed),
        "by_kind": seen[0][0],
        "read_bytes": proxy.count().out_bytes,
        "seconds": round(seen[0][1] - started_s, 2),
        "sources": sources,
        "subtask_ms_median": round(
            sorted(one.seconds for one in restores)[len(restores) // 2] * 1000, 1
        ),
    }


def _spark_files(
    spark: Any, source: Path, work: Path, batches: int, partitions: int, progress: Any
) -> dict[str, Any]:
    """Files in the checkpoint location of Spark's own stateful queries, one batch more each."""
    few = work / "few"
    few.mkdir()
    for batch in range(batches):
        _add_batch(source, few, batch)
    kinds = {"groupBy": stream(spark, few).groupBy("k").agg(F.count(F.lit(1)).alias("n"))}
    found = {}
    for name, result in kinds.items():
        checkpoint, seen = work / f"spark-{name}", []

        def sink(batch: Any, number: int, folder: Path = checkpoint, into: Any = seen) -> None:
            batch.write.format("noop").mode("overwrite").save()
            into.append((files_below(folder), time.perf_counter()))

        writer = result.writeStream.outputMode("update").foreachBatch(sink)
        writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        run_to_end(writer)
        more = _less(seen[-1][0], seen[-2][0])
        found[name] = {
            "files_in_the_last_batch": more,
            "state_files_a_batch": sum(n for k, n in more.items() if k.startswith("state")),
            "without_crc": more.get("state", 0),
            "batch_s": round(seen[-1][1] - seen[-2][1], 2),
        }
        progress(f"Spark's {name}, {partitions} partitions: {found[name]}")
    return found


def _at_defaults(run: dict[str, Any]) -> dict[str, Any]:
    """Counted: a commit is one request, bases are in it, a cleaning is so many."""
    parts = run["requests"]
    cleaning = sum(n for name, n in parts.items() if name != "put_if log/")
    each = cleaning / max(1, run["cleanings"])
    every = SETTINGS["clean_every_epochs"].default
    return {
        "requests_a_cleaning": round(each, 2),
        "clean_every_epochs": every,
        "requests_an_epoch": round(run["commits_an_epoch"] + each / every, 3),
    }


def requests_text(found: dict[str, Any]) -> str:
    """The figures to read."""
    run, durable, local = found["run"], found["restart_durable"], found["restart_local"]
    lines = [
        f"Requests: {found['subtasks']} subtasks, {run['delta_bytes_a_subtask']} bytes of change "
        f"each, {run['counted_epochs']} epochs counted, {found['settings']}",
        f"  an epoch: {run['commits_an_epoch']:.2f} requests to commit; with {run['cleanings']} "
        f"cleanings and {run['inline_bases']} bases {run['requests_an_epoch']:.3f} "
        f"({run['requests']}); at the defaults {found['at_defaults']['requests_an_epoch']:.3f}",
        f"  sent in an epoch: {run['sent_bytes_an_epoch']:,} bytes; largest record "
        f"{run['record_bytes_max']:,}, its manifest {run['manifest_bytes_max']:,}; "
        f"{run['epoch_s']:.2f} s an epoch",
        f"  Spark's own files in the checkpoint location: "
        f"{run['spark_checkpoint_files_a_batch']:.2f} a batch",
    ]
    for name, one in (("without", durable), ("with", local)):
        lines.append(
            f"  restart {name} local copies: {one['requests']} requests, "
            f"{one['records_since_oldest_base']} records are needed ({one['by_kind']}); "
            f"{one['seconds']:.1f} s to the end of the first batch; {one['sources']}"
        )
    for name, one in found["spark"].items():
        lines.append(
            f"  Spark's {name} in {found['subtasks']} partitions: {one['state_files_a_batch']} "
            f"state files a batch ({one['without_crc']} without .crc), {one['batch_s']:.1f} s"
        )
    return "\n".join(lines)
