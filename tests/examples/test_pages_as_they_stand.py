"""Programs and commands of the first pages, pasted into files and run as they stand.

The README's program is killed with SIGKILL. Getting started's commands run in the page's order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # each run starts a Spark of its own

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAVED_AS = re.compile(r"Save this as `(\w+\.py)`")
BOUND_S = 240


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [block for kind, block in FENCE.findall(text) if kind == language]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1", "COLUMNS": "200"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the virtual environment of the pages, whose commands are this one's."""
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name, what in (("python", ""), ("statebackend", " -m statebackend.cli")):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}"{what} "$@"\n', encoding="utf-8")
        command.chmod(0o755)
    return tmp_path


def run(script: str, folder: Path) -> str:
    """A block of shell commands; what it printed."""
    done = subprocess.run(
        ["/bin/sh", "-euc", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- the README ----------------------------------------------------------------------------------


class Drivers:
    """The README's programs, each a process group, all of which are gone at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, program: str) -> subprocess.Popen[bytes]:
        path = self.folder / "readme.py"
        path.write_text(program, encoding="utf-8")
        with (self.folder / "readme.log").open("ab") as log:
            made = subprocess.Popen(
                [sys.executable, str(path)],
                cwd=self.folder,
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(made)
        return made

    def kill(self, driver: subprocess.Popen[bytes]) -> None:
        """Python, its JVM and the workers, all at once."""
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        self._started.remove(driver)

    def end(self) -> None:
        for driver in list(self._started):
            self.kill(driver)


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Drivers]:
    made = Drivers(tmp_path)
    yield made
    made.end()


def add(folder: Path, number: int, users: Mapping[str, int]) -> None:
    """A file of clicks, which is there whole or not at all."""
    folder.mkdir(exist_ok=True)
    draft = folder / f".{number}.json"
    lines = [f'{{"user": "{user}"}}\n' for user, clicks in users.items() for _ in range(clicks)]
    draft.write_text("".join(lines), encoding="utf-8")
    draft.rename(folder / f"{number}.json")


def counted(folder: Path) -> Counter[str]:
    """The newest count of each user, of the batches that Spark's sink has committed."""
    newest: Counter[str] = Counter()
    for entry in sorted((folder / "_spark_metadata").glob("[0-9]*")):
        for name in re.findall(r'"path":"file://([^"]+)"', entry.read_text(encoding="utf-8")):
            for row in pq.read_table(name).to_pylist():
                newest[row["user"]] = max(newest[row["user"]], row["n"])
    return newest


def test_the_readmes_programs_count_on_after_sigkill(tmp_path: Path, drivers: Drivers) -> None:
    def placed(block: str) -> str:
        """As it stands, but for where this machine has its folders."""
        block = block.replace("s3://bucket/state", f"file://{tmp_path}/state")
        return block.replace("/var/tmp", f"{tmp_path}/local").replace('"/data', f'"{tmp_path}')

    first, second = map(placed, blocks("README.md", "python"))
    said: Counter[str] = Counter()

    def comes(users: dict[str, int], out: str, driver: subprocess.Popen[bytes]) -> None:
        add(tmp_path / "clicks", len(list((tmp_path / "clicks").glob("[0-9]*"))), users)
        said.update(users)
        log = tmp_path / "readme.log"

        def done() -> bool:
            assert driver.poll() is None, log.read_text(encoding="utf-8")
            return counted(tmp_path / out) == said

        until(done, timeout_s=BOUND_S)

    add(tmp_path / "clicks", 0, {"ann": 2, "bob": 1})
    said.update({"ann": 2, "bob": 1})
    driver = drivers.start(first)
    comes({"ann": 1}, "counts", driver)
    drivers.kill(driver)
    driver = drivers.start(first)
    comes({"ann": 4, "eve": 1}, "counts", driver)
    drivers.kill(driver)

    beginning = first.partition("counts = ")[0].replace("statebackend.install(", "# install(")
    assert "# install(" in beginning
    driver = drivers.start(f"{beginning}\n{second}\nquery.awaitTermination()\n")
    comes({"bob": 2}, "named", driver)
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names[0] == "clicks", "the job's own name"
    assert re.fullmatch(r"clicks-[0-9a-f]{8}", names[1]), "by the query's name and its location"


# --- getting started -----------------------------------------------------------------------------

PAGE = "docs/getting-started.md"


def shown(table: str) -> dict[str, int]:
    """The rows of ``show()``."""
    return {user: int(n) for user, n in re.findall(r"^\|\s*(\w+)\|\s*(\d+)\|$", table, re.M)}


def test_getting_started_runs_from_top_to_bottom(home: Path) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    program, named = blocks(PAGE, "python")
    begin, end = program.index("def run("), program.index("\n\ndef main(")
    (home / "first_job.py").write_text(program, encoding="utf-8")
    other = program[:begin] + named + program[end:]
    (home / "named_job.py").write_text(other, encoding="utf-8")
    assert SAVED_AS.findall(text) == ["first_job.py"]

    counts: dict[str, int] = {}
    listed, compared = "", 0
    for found in FENCE.finditer(text):
        lines = [] if found[1] != "sh" else found[2].splitlines()
        script = "\n".join(line for line in lines if not re.search(r"-m venv|pip install", line))
        if not script:
            continue
        out = run(script, home)
        counts = shown(out) or counts
        listed = out if " list " in script else listed
        said = text[found.end() :].partition("\n```")[0]
        for n, user in re.findall(r"(\d+) for `(\w+)`", said):
            assert counts[user] == int(n), f"after {script}: {out}"
            compared += 1
    assert compared == 5, "each count that the page names was compared"
    assert counts == {"ann": 3, "bob": 2}
    assert re.search(r"\bclicks-[0-9a-f]{8}\b", listed), "the job that is named by the query"
    assert re.search(r"\bclicks\b(?!-)", listed), "and the one with a name of its own"


# --- pages with one program ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("docs/howto/foreach-batch.md", "batch 0 has 2 rows"),
        ("docs/howto/asynchronous-commits.md", "durable up to epoch 2"),
        ("docs/howto/event-time-behind.md", "|2026-01-01 00:00:00|    2|"),
    ],
)
def test_a_pages_program_prints_what_the_page_says(page: str, printed: str, home: Path) -> None:
    (name,) = SAVED_AS.findall((ROOT / page).read_text(encoding="utf-8"))
    (home / name).write_text(blocks(page, "python")[0], encoding="utf-8")
    (command,) = [block for block in blocks(page, "sh") if name in block]
    assert printed in run(command, home)
