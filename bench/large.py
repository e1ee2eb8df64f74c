"""Large state in one subtask, on S3: `python -m bench large`.

1 GB of values that do not compress; each epoch changes 5 MB of them, anywhere. The worker's path is
the product's own without Spark (see bench.inproc); the store is a real S3 server on this host.

*defaults*: as the settings are, until the second base. *often*: a base after each five epochs.
*uploads on and off*: blocks of epochs in turn, the first of a block with the right to upload a base
or not; each epoch starts a fixed time after the one before, as a trigger would start it.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from bench.inproc import UID
from bench.payload import VALUE_BYTES, Large, wait_for_uploads
from bench.s3 import Place, place
from statebackend.rocks.store import RocksStore

__all__ = ["large", "large_text"]

_OFTEN = {"base_every_epochs": 2, "base_apart_ratio": 0.0}
_PAIRS = 7
_BLOCK = 5
_NEVER = 1 << 60


@dataclass
class _Reads:
    """Point reads of state: keys and nanoseconds."""

    keys: int = 0
    ns: int = 0


@contextlib.contextmanager
def _timed_reads() -> Iterator[_Reads]:
    reads, plain = _Reads(), RocksStore.multi_get

    def multi_get(self: RocksStore, keys: Sequence[bytes]) -> list[bytes | None]:
        start = time.perf_counter_ns()
        found = plain(self, keys)
        reads.ns += time.perf_counter_ns() - start
        reads.keys += len(keys)
        return found

    with mock.patch.object(RocksStore, "multi_get", multi_get):
        yield reads


def large(*, state_mb: int, work: Path, progress: Any) -> dict[str, Any]:
    """Everything above; ``progress`` is called with lines."""
    keys = (state_mb << 20) // VALUE_BYTES
    changed = keys * 5 // 1024
    found: dict[str, Any] = {
        "state_bytes": keys * VALUE_BYTES,
        "changed_bytes_an_epoch": changed * VALUE_BYTES,
    }
    with place(work / "s3") as server:
        often = {**_OFTEN, "base_apart_min_bytes": changed * VALUE_BYTES * 9 // 2}
        subject = _filled(work / "often", server, "often", keys, often, progress)
        found["often"] = _epochs(subject, changed, 30, progress, unhurried=True)
        found["on_off"] = _on_off(subject, changed, progress)
        found["restore"] = _restore(subject, progress)
        subject.harness.close()
        shutil.rmtree(subject.folder)
        subject = _filled(work / "defaults", server, "defaults", keys, {}, progress)
        found["defaults"] = _epochs(subject, changed, 200, progress)
        subject.harness.close()
    return found


def _filled(
    folder: Path, server: Place, name: str, keys: int, overrides: dict[str, Any], progress: Any
) -> Large:
    started_s = time.perf_counter()
    subject = Large(folder, server=server, name=name, keys=keys, overrides=overrides)
    subject.fill()
    progress(f"large, {name}: filled in {time.perf_counter() - started_s:.1f} s")
    return subject


def _epochs(
    subject: Large, changed: int, epochs: int, progress: Any, *, unhurried: bool = False
) -> dict[str, Any]:
    """So many epochs, and what they sent; ``unhurried``: each waits for the upload before it."""
    harness = subject.harness
    book = harness.session.progress
    driver_before = _sent(harness.driver_store.counts)
    bases_before = len(book.summary(None).bases)
    took_s, level0, read_ns, sent = [], [], [], 0
    with _timed_reads() as reads:
        for number in range(epochs):
            reads.keys = reads.ns = 0
            took_s.append(subject.change(changed))
            newest = book.summary(None)
            level0.append(newest.subtasks[-1].figures["level0_files"])
            sent += _sent_of(newest.epochs[-1].requests)
            read_ns.append(reads.ns / reads.keys)
            if unhurried:
                wait_for_uploads()
            if number % 30 == 29:
                progress(f"large: epoch {number + 1}/{epochs}, {took_s[-1] * 1000:.0f} ms")
    wait_for_uploads()
    bases = book.summary(None).bases[bases_before:]
    base_bytes = sum(base.uploaded_bytes for base in bases)
    record_bytes = _sent(harness.driver_store.counts) - driver_before
    changed_bytes = changed * VALUE_BYTES * epochs
    few = max(3, epochs // 6)
    return {
        "epochs": epochs,
        "changed_bytes": changed_bytes,
        "sent_bytes": {"deltas": sent, "bases": base_bytes, "records": record_bytes},
        "sent_for_a_changed_byte": round((sent + base_bytes + record_bytes) / changed_bytes, 2),
        "without_the_first_base": round(
            (sent + sum(b.uploaded_bytes for b in bases[1:]) + record_bytes) / changed_bytes, 2
        ),
        "bases": [
            {
                "epoch": base.epoch,
                "kind": base.kind,
                "state_bytes": base.state_bytes,
                "uploaded_bytes": base.uploaded_bytes,
                "new_share": round(base.uploaded_bytes / base.state_bytes, 3),
                "seconds": round(base.seconds, 2),
            }
            for base in bases
        ],
        "epoch_ms_median": _ms(took_s),
        "level0_max": max(level0),
        "level0": level0,
        "read_us": [round(ns / 1000, 1) for ns in read_ns],
        "read_us_first": round(statistics.median(read_ns[:few]) / 1000, 2),
        "read_us_last": round(statistics.median(read_ns[-few:]) / 1000, 2),
    }


def _sent(counts: Any) -> int:
    return sum(one.size_bytes for verb, one in counts.items() if verb in ("create", "put"))


def _sent_of(requests: dict[str, tuple[int, int]]) -> int:
    return sum(size for verb, (_, size) in requests.items() if verb.startswith("put"))


def _ms(values_s: Sequence[float]) -> float:
    return round(statistics.median(values_s) * 1000, 1)


def _on_off(subject: Large, changed: int, progress: Any) -> dict[str, Any]:
    """Paired blocks of epochs, with and without a base being uploaded."""
    subject.change(changed)
    wait_for_uploads()
    unhurried = _paired(subject, changed, every_s=1.0)
    progress(f"large, a batch each second, uploads on/off: {unhurried['ratio_median']}")
    hurried = _paired(subject, changed, every_s=0.0)
    progress(f"large, back to back, uploads on/off: {hurried['ratio_median']}")
    return {"a_batch_a_second": unhurried, "back_to_back": hurried}


def _paired(subject: Large, changed: int, *, every_s: float) -> dict[str, Any]:
    pairs = []
    for pair in range(_PAIRS):
        blocks = {}
        for on in (True, False)[:: 1 if pair % 2 else -1]:
            blocks["on" if on else "off"] = _block(subject, changed, on=on, every_s=every_s)
            wait_for_uploads()
        pairs.append(blocks)
    book = subject.harness.session.progress.summary(None)
    bases = book.bases[-_PAIRS:]
    ratios = [sum(pair["on"]) / sum(pair["off"]) for pair in pairs]
    return {
        "block_epochs": _BLOCK,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio_median": round(statistics.median(ratios), 3),
        "epoch_ms": {
            side: _ms([took for pair in pairs for took in pair[side]]) for side in ("on", "off")
        },
        "upload_bytes": [base.uploaded_bytes for base in bases],
        "upload_s_median": round(statistics.median(base.seconds for base in bases), 2),
    }


def _block(subject: Large, changed: int, *, on: bool, every_s: float) -> list[float]:
    book = subject.harness.coordinator.run.operators[UID].bases
    usual, took_s = book.policy, []
    try:
        for number in range(_BLOCK):
            allowed = 0 if on and number == 0 else _NEVER
            book.policy = replace(usual, apart_min_bytes=allowed, apart_every_epochs=_NEVER)
            took_s.append(subject.change(changed))
            time.sleep(max(0.0, every_s - took_s[-1]))
    finally:
        book.policy = usual
    return took_s


def _restore(subject: Large, progress: Any) -> dict[str, Any]:
    """From the uploaded files, and from the local copy: what the product reports of it."""
    book = subject.harness.coordinator.run.operators[UID].bases
    usual, book.policy = book.policy, replace(book.policy, apart_min_bytes=0)
    subject.change(8)
    wait_for_uploads()
    book.policy = usual
    subject.change(8)  # its record names the base
    found = {}
    for name in ("local", "durable"):
        subject.harness.close()
        if name == "durable":
            shutil.rmtree(subject.folder / "local")
        subject.harness.restart()
        subject.run(subject._random.choice(subject.keys, 2000, replace=False))  # checks its reads
        wait_for_uploads()
        report = subject.harness.session.restores[-1]
        found[name] = {
            "state_bytes": subject.keys * VALUE_BYTES,
            "source": report.source,
            "seconds": round(report.seconds, 3),
            "local_bytes": report.local_bytes,
            "durable_bytes": report.durable_bytes,
            "durable_reads": report.durable_reads,
        }
        progress(f"large, restore: {found[name]}")
    return found


def large_text(found: dict[str, Any]) -> str:
    """The figures to read."""
    lines = [
        f"Large state: {found['state_bytes'] / 1e6:,.0f} MB in one subtask, "
        f"{found['changed_bytes_an_epoch'] / 1e6:.1f} MB changed in an epoch"
    ]
    for name in ("defaults", "often"):
        one = found[name]
        lines += [
            f"  {name}: {one['epochs']} epochs of {one['epoch_ms_median']:.0f} ms; sent for a "
            f"changed byte {one['sent_for_a_changed_byte']} (without the first base "
            f"{one['without_the_first_base']}); at most {one['level0_max']} level-0 files; a "
            f"point read {one['read_us_first']:.1f} us at first, {one['read_us_last']:.1f} at last",
        ]
        for base in one["bases"]:
            lines.append(
                f"    base of epoch {base['epoch']} ({base['kind']}): {base['new_share']:.1%} of "
                f"{base['state_bytes'] / 1e6:,.0f} MB sent, in {base['seconds']:.1f} s"
            )
    for name, one in found["on_off"].items():
        lines.append(
            f"  uploads on against off, {name}: {one['ratio_median']:.3f} ({one['ratios']}), "
            f"an epoch {one['epoch_ms']['on']:.0f} and {one['epoch_ms']['off']:.0f} ms; an upload "
            f"takes {one['upload_s_median']:.1f} s"
        )
    for name, one in found["restore"].items():
        lines.append(f"  restore, {name}: {one}")
    return "\n".join(lines)
