"""How much memory large things take: `python -m bench memory`.

Resident memory of the process that does it, large against small: uploading a base of 1 GB,
restoring it from its files, and an epoch of 4 GB of input (see bench.spill_memory). ``RssAnon`` is
sampled each 5 ms; ``VmHWM`` is the kernel's own peak, set back before each step.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.inproc import UID
from bench.machine import ROOT
from bench.payload import VALUE_BYTES, Large, Payload, wait_for_uploads
from bench.s3 import Place, place
from bench.spill_memory import SMALL_ROWS, status_mb
from bench.spill_memory import _process as spill_process

__all__ = ["memory", "memory_text"]

_SMALL_MB = 16
_SAMPLE_S = 0.005
_FILL_EPOCHS_MB = 128
_OVERRIDES = {
    "base_every_epochs": 2,
    "base_apart_min_bytes": 1 << 60,
    "block_cache_bytes": 64 << 20,  # by itself it is as large as the host allows
}


def memory(*, base_mb: int, input_mb: int, work: Path) -> dict[str, Any]:
    """Each step small and large, each size in processes of its own."""
    found: dict[str, Any] = {}
    with place(work / "s3") as server:
        sizes = {"small": _SMALL_MB, "large": base_mb}
        runs = {name: _base(server, work / name, mb) for name, mb in sizes.items()}
    for step in ("upload", "restore"):
        found[step] = {name: run[step] for name, run in runs.items()}
    given = SimpleNamespace(text_bytes=180, hot=0.0, budget_mb=64, overlay_mb=64, work=work)
    rows = input_mb * 1_000_000 // (given.text_bytes + 20)
    found["epoch"] = {
        "small": spill_process(given, SMALL_ROWS, SMALL_ROWS),  # type: ignore[arg-type]
        "large": spill_process(given, rows, rows),  # type: ignore[arg-type]
    }
    for pair in found.values():
        for what in ("peak_rss_anon_mb", "vm_hwm_mb"):
            pair[f"{what} grown"] = round(pair["large"][what] - pair["small"][what])
    return {"base_mb": base_mb, "input_mb": input_mb, "limit_mb": 256, **found}


def _base(server: Place, folder: Path, mb: int) -> dict[str, Any]:
    found = {}
    for step in ("fill", "upload", "restore"):
        command = [sys.executable, "-m", "bench.memory", step, server.address, str(folder), str(mb)]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        found[step] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- one process -------------------------------------------------------------------------------


@contextlib.contextmanager
def _watched() -> Iterator[dict[str, float]]:
    """The peaks of what runs inside."""
    found: dict[str, float] = {}
    start_mb = peak_mb = status_mb("RssAnon")
    # Sets the kernel's own peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    stop = threading.Event()

    def sample() -> None:
        nonlocal peak_mb
        while not stop.wait(_SAMPLE_S):
            peak_mb = max(peak_mb, status_mb("RssAnon"))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    started_s = time.perf_counter()
    yield found
    found["seconds"] = round(time.perf_counter() - started_s, 2)
    stop.set()
    thread.join()
    found["start_rss_anon_mb"] = round(start_mb)
    found["peak_rss_anon_mb"] = round(peak_mb)
    found["vm_hwm_mb"] = round(status_mb("VmHWM"))


def _fill(server: Place, folder: Path, mb: int) -> dict[str, Any]:
    subject = _subject(server, folder, "first", mb)
    subject.fill(max(2, mb // _FILL_EPOCHS_MB))
    return _left(subject, folder)


def _upload(server: Place, folder: Path, mb: int) -> dict[str, Any]:
    subject = _subject(server, folder, "first", mb)
    subject.change(8)
    book = subject.harness.coordinator.run.operators[UID].bases
    while not book.large_bytes:
        subject.change(8)  # a base in the record is tried, and found too large
    book.policy = replace(book.policy, apart_min_bytes=0, apart_ratio=0.0)
    with _watched() as found:
        subject.change(8)
        wait_for_uploads()
    base = subject.harness.session.progress.summary(None).bases[-1]
    subject.change(8)  # its record names it
    _left(subject, folder)
    return {**found, "uploaded_bytes": base.uploaded_bytes, "kind": base.kind}


def _restore(server: Place, folder: Path, mb: int) -> dict[str, Any]:
    subject = _subject(server, folder, "second", mb)
    with _watched() as found:
        subject.change(64)
    report = subject.harness.session.restores[-1]
    _left(subject, folder)
    return {**found, "source": report.source, "durable_bytes": report.durable_bytes}


def _subject(server: Place, folder: Path, place_name: str, mb: int) -> Large:
    """The job as the process before left it: its log, and local copies if the place is the same."""
    processor, epoch, state = Payload(), 0, folder / "state.json"
    if state.exists():
        left = json.loads(state.read_text())
        processor.written = {int(key): offset for key, offset in left["written"].items()}
        epoch = left["epoch"]
    subject = Large(
        folder / place_name,
        server=server,
        name=folder.name,
        keys=(mb << 20) // VALUE_BYTES,
        overrides=_OVERRIDES,
        processor=processor,
    )
    subject.harness.epoch = epoch
    return subject


def _left(subject: Large, folder: Path) -> dict[str, Any]:
    wait_for_uploads()
    subject.harness.close()
    state = {"epoch": subject.harness.epoch, "written": subject.processor.written}
    (folder / "state.json").write_text(json.dumps(state))
    return {}


def main() -> int:
    step, address, folder, mb = sys.argv[1:]
    run = {"fill": _fill, "upload": _upload, "restore": _restore}[step]
    print(json.dumps(run(Place(address), Path(folder), int(mb))))
    return 0


def memory_text(found: dict[str, Any]) -> str:
    """The figures to read."""
    lines = [
        f"Memory, MB, large ({found['base_mb']} MB of state, {found['input_mb']} MB of input) "
        f"against small; at most {found['limit_mb']} MB more:"
    ]
    for step in ("upload", "restore", "epoch"):
        one = found[step]
        lines += [
            f"  {step:<8} {what:<17} {one['small'][what]:>6.0f} -> {one['large'][what]:>6.0f}"
            f"  {one[f'{what} grown']:+d}"
            for what in ("peak_rss_anon_mb", "vm_hwm_mb")
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
