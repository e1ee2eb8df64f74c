"""The four questions of an operator, put to the page of a real job: `python -m bench.page_trial`.

A query runs in a driver of its own, with its state on an S3 server on loopback. One key is slow.
The server is stopped for a while, the driver is killed and started again. For each question it
prints what the page says, where, and after how long; `--pictures FOLDER` keeps what Chromium shows.

    pip install playwright pillow; apt-get install chromium
    python -m bench.page_trial --subtasks 8
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from bench.monitoring import _free_port
from bench.page_shots import PHONE, WIDE, look, served
from bench.s3 import REGION, Place, place
from bench.side import session
from statebackend.ui.stored_job_view import StoredJobs

JOB, KEYS, ROWS_PER_S = "trial", 2_000, 1_000
WAIT_S = 600.0  # for one answer; a wide job on a small machine needs more
TABS = ("", "checkpoints", "summary", "restores", "savepoints", "state", "settings")


def drive(uri: str, endpoint: str, work: Path, port: int, subtasks: int) -> None:
    """The driver: it ends when somebody ends it."""
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    from statebackend import StateBackend

    class Counter(StatefulProcessor):  # by value: it is of __main__
        def init(self, handle: Any) -> None:
            self.count = handle.getValueState("count", "n bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            n = (self.count.get() or (0,))[0] + sum(1 for _ in rows)
            if key[0] == "0":
                time.sleep(3.0)
            self.count.update((n,))
            return iter(())

        def close(self) -> None:
            pass

    spark = session({"side": "trial", "work": str(work), "partitions": subtasks})
    backend = StateBackend(
        spark,
        uri=uri,
        job=JOB,
        local_dir=str(work / "local"),
        parallelism=subtasks,
        max_parallelism=max(128, subtasks),
        settings={"s3_endpoint": endpoint, "s3_region": REGION, "ui_port": port},
    )
    rows = spark.readStream.format("rate").option("rowsPerSecond", ROWS_PER_S).load()
    counts = backend.transform_with_state(
        rows.selectExpr(f"cast(value % {KEYS} as string) k"),
        keys="k",
        processor=Counter(),
        output_schema="k string",
        uid="counter",
    )
    writer = counts.writeStream.format("noop").option("checkpointLocation", str(work / "location"))
    backend.start(writer.trigger(processingTime="5 seconds")).awaitTermination()


@dataclass
class Trial:
    """What is asked, of whom, and what was found."""

    browser: Browser
    pictures: Path | None
    wait_s: float = WAIT_S
    base: str = ""
    wrong: list[str] = field(default_factory=list)

    def text(self, path: str) -> str:
        """A page's words; empty: it is not served (yet)."""
        page = self.browser.new_page()
        try:
            page.goto(f"{self.base}/jobs/{JOB}/{path}", wait_until="load", timeout=30_000)
            return " ".join(page.inner_text("body").split())
        except Exception:
            return ""
        finally:
            page.close()

    def until(self, path: str, pattern: str) -> re.Match[str]:
        """Read a page again and again until it says something."""
        end_s = time.monotonic() + self.wait_s
        while time.monotonic() < end_s:
            if found := re.search(pattern, self.text(path)):
                return found
            time.sleep(0.5)
        raise TimeoutError(f"{path!r} never said {pattern!r}, but {self.text(path)[:600]!r}")

    def asked(self, question: str, path: str, pattern: str) -> None:
        """Put a question; print the answer and how long it took to be there."""
        began_s = time.monotonic()
        found = self.until(path, pattern)
        took_s = time.monotonic() - began_s
        print(f"{question} [{path or 'overview'}, {took_s:.1f} s]\n    {found[0]}", flush=True)
        self.shot(question, path)

    def shot(self, name: str, path: str) -> None:
        """See a page in Chromium as it is now: light and dark, wide and on a phone."""
        for size, dark in ((WIDE, False), (PHONE, True)):
            took_s, wrong, picture = look(
                self.browser, self.base, f"/jobs/{JOB}/{path}", size, dark=dark
            )
            self.wrong += [f"{path}: {one}" for one in wrong]
            if wrong:
                print(f"    {path or 'overview'}: {wrong}", flush=True)
            if self.pictures is not None:
                plain = re.sub(r"\W+", "-", f"{name} {path}").strip("-").lower()
                kind = "phone" if size is PHONE else f"wide-{took_s:.2f}s"
                (self.pictures / f"{plain}-{kind}.png").write_bytes(picture)

    def tabs(self, name: str, *more: str) -> None:
        """Each tab, with how long it takes to load the first time and again."""
        for path in (*TABS, *more):
            times_s = []
            for _ in range(2):
                took_s, wrong, _ = look(
                    self.browser, self.base, f"/jobs/{JOB}/{path}", WIDE, dark=False
                )
                times_s.append(f"{took_s:.2f}")
                self.wrong += [f"{path}: {one}" for one in wrong]
            print(f"    {name}: {path or 'overview':20} {' then '.join(times_s)} s", flush=True)
            self.shot(name, path)


@contextlib.contextmanager
def driver(*words: str) -> Iterator[Callable[[int], None]]:
    """A driver; gives what sends its whole process group a signal."""
    command = [sys.executable, "-m", "bench.page_trial", "--drive", *words]
    process = subprocess.Popen(command, start_new_session=True)

    def send(number: int) -> None:
        os.killpg(process.pid, number)

    try:
        yield send
    finally:
        with contextlib.suppress(ProcessLookupError):
            send(signal.SIGKILL)
        process.wait(30)


def try_out(trial: Trial, server: Place, work: Path, subtasks: int) -> None:
    port = _free_port()
    given = (server.uri("state"), server.url, str(work), str(port), str(subtasks))
    trial.base = f"http://127.0.0.1:{port}"
    with driver(*given) as send:
        trial.asked("While it starts", "", r"(Running|Slow|Stuck)[^.]*\.[^.]*\.")
        trial.asked("Is it committed?", "", r"Checkpoint [2-9]\d* was complete")
        newest = trial.until("", r"newest durable checkpoint (\d+)")[1]
        path = f"checkpoints/{newest}"
        trial.asked("Which subtask is slow?", path, r"(Skewed|Even): .{0,220}")
        trial.tabs("it runs", path)
        server.freeze(True)
        trial.asked("Why is nothing committed?", "", r"(Stuck: the object|Slow: the record).{0,90}")
        trial.asked("Is it safe to stop (store down)?", "", r"Is it safe to stop\? [^.]*\.[^.]*\.")
        server.freeze(False)
        trial.asked("The store is back", "", r"Running[^.]*\.")
        trial.asked("Is it safe to stop?", "", r"Is it safe to stop\? Yes[^.]*\.[^.]*\.")
        send(signal.SIGKILL)
    with served(StoredJobs(server.uri("state"), server.options())) as base:
        trial.base = base
        trial.asked("The driver is gone", "", r"Checkpoint \d+ is the newest.{0,80}")
        trial.tabs("nothing runs", path)
    trial.base = f"http://127.0.0.1:{port}"
    with driver(*given):
        trial.asked(
            "Where did the state come from?",
            "",
            r"counter: [\d,]+ subtasks at checkpoint [1-9].{0,120}",
        )
        trial.shot("Where from in full", "restores")
        print("   ", trial.until("restores", r"generation 2 .{0,80}")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subtasks", type=int, default=8)
    parser.add_argument("--wait", type=float, default=WAIT_S, help="seconds for one answer")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--drive", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        uri, endpoint, work, port, subtasks = given.drive
        drive(uri, endpoint, Path(work), int(port), int(subtasks))
        return 0
    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        place(Path(folder) / "s3") as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        trial = Trial(browser, given.pictures, given.wait)
        try_out(trial, server, Path(folder), given.subtasks)
        browser.close()
    print("wrong:", sorted(set(trial.wrong)) or "nothing")
    return 1 if trial.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
