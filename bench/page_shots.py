"""The pictures of docs/howto/checkpoint-page.md, and how long each page takes to load.

    pip install playwright pillow; apt-get install chromium
    python -m bench.page_shots --pictures docs/img            # made-up jobs, always the same
    python -m bench.page_shots --times                         # a real folder of 10,000 checkpoints

It ends with 1 where a page takes a second or more, asks another server, or writes to the console.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from bench.page_history import write_history
from bench.page_jobs import NOW_MS, MadeJob, MadeJobs
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.system import new_id
from statebackend.ui.job_figures import RunFacts, Waiting
from statebackend.ui.job_pages import JobSite
from statebackend.ui.page_server import PageServer
from statebackend.ui.stored_job_view import StoredJobs

WIDE, PHONE = (1180, 820), (400, 820)
WIDTHS, EPOCHS = (1, 40, 1_000), 10_000
PAGES = ("", "checkpoints", "summary", "summary?of=10000", "restores", "savepoints", "state")
LIMIT_S = 1.0

STUCK = RunFacts(
    active=True,
    epoch=10_000,
    durable_epoch=9_999,
    running_s=74.0,
    durable_s=75.0,
    waiting=[Waiting(operator="counter", subtasks=[7], parallelism=40)],
)
DOWN = RunFacts(active=True, epoch=10_000, durable_epoch=9_999, writing=True, store_out_s=43.0)
MADE = MadeJobs(
    [
        MadeJob("one", 1, EPOCHS),
        MadeJob("clicks", 40, EPOCHS),
        MadeJob("wide", 1_000, EPOCHS, slow=613),
        MadeJob("continuous", 40, 300, mode="continuous"),
        MadeJob("stuck", 40, EPOCHS, running=STUCK),
        MadeJob("down", 40, EPOCHS, running=DOWN),
    ]
)
# name, path, viewport, dark
PICTURES = (
    ("page-overview", "/jobs/clicks/", WIDE, False),
    ("page-overview-phone", "/jobs/clicks/", PHONE, True),
    ("page-one-subtask", "/jobs/one/checkpoints/9999", WIDE, False),
    ("page-40-subtasks", "/jobs/clicks/checkpoints/9999", WIDE, False),
    ("page-1000-subtasks", "/jobs/wide/checkpoints/9999", WIDE, True),
    ("page-history", "/jobs/wide/checkpoints?around=4321", WIDE, False),
    ("page-stuck", "/jobs/stuck/", WIDE, False),
    ("page-store-down", "/jobs/down/", WIDE, False),
)


@contextmanager
def served(jobs: Any) -> Iterator[str]:
    server = PageServer(JobSite(jobs, lambda: NOW_MS), host="127.0.0.1", port=0, token="")
    try:
        yield server.url.rstrip("/")
    finally:
        server.stop()


def look(
    browser: Browser, base: str, path: str, size: tuple[int, int], *, dark: bool
) -> tuple[float, list[str], bytes]:
    """Seconds until it is loaded, what is wrong with it, and a picture."""
    wrong: list[str] = []
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
    )
    page = context.new_page()
    page.on("console", lambda said: wrong.append(f"console: {said.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    page.on("request", lambda one: one.url.startswith(base) or wrong.append(f"asked: {one.url}"))
    began_s = time.perf_counter()
    answer = page.goto(base + path, wait_until="load")
    took_s = time.perf_counter() - began_s
    if answer is None or answer.status != 200:
        wrong.append(f"status: {answer.status if answer else None}")
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        wrong.append("wider than the window")
    picture = page.screenshot()
    context.close()
    return took_s, wrong, picture


def pictures(browser: Browser, folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    ok = True
    with served(MADE) as base:
        for name, path, size, dark in PICTURES:
            took_s, wrong, picture = look(browser, base, path, size, dark=dark)
            image = Image.open(io.BytesIO(picture)).convert("RGB")
            image.save(folder / f"{name}.webp", quality=60, method=6)
            print(f"{name}: {took_s:.2f} s {wrong or ''}", flush=True)
            ok &= not wrong
    return ok


def times(browser: Browser) -> bool:
    ok = True
    with tempfile.TemporaryDirectory() as folder:
        uri = Path(folder).as_uri()
        for subtasks in WIDTHS:
            job = f"{subtasks} subtasks"
            store = open_store(job_folder(uri, job), new_id=new_id)
            write_history(store, job, subtasks=subtasks, epochs=EPOCHS)
        with served(StoredJobs(uri, StoreOptions())) as base:
            for subtasks in WIDTHS:
                root = f"/jobs/{subtasks}%20subtasks/"
                for path in (*PAGES, f"checkpoints/{EPOCHS - 1}", "checkpoints?around=4321"):
                    seen = [look(browser, base, root + path, WIDE, dark=False) for _ in range(3)]
                    wrong = [text for _, found, _ in seen for text in found]
                    first_s, again_s = seen[0][0], statistics.median(s for s, _, _ in seen[1:])
                    print(
                        f"{subtasks:5} {path or 'overview':25} first {first_s:.2f} s, "
                        f"again {again_s:.2f} s {wrong or ''}",
                        flush=True,
                    )
                    ok &= not wrong and again_s < LIMIT_S
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="the folder of the pictures")
    parser.add_argument("--times", action="store_true", help="how long pages take to load")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    ok = True
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        if given.pictures is not None:
            ok &= pictures(browser, given.pictures)
        if given.times:
            ok &= times(browser)
        browser.close()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
