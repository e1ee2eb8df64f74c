"""Bars of verbs that take long: on a terminal, and nowhere else."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import statebackend
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend.cli.job_commands import app
from statebackend.cli.progress_bars import progress_bar, progress_bars
from statebackend.spark.from_tables.write_savepoint import write_savepoint
from statebackend.tables.given_operators import OperatorState
from statebackend.work_done import WorkDone
from tests.cli.folder import JOB, Folder, new_id

ROWS = pa.table({"user": ["ann", "bob"], "n": pa.array([1, 2], pa.int64())})
_STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """Standard error as a terminal, and what was written to it, without colours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = ""
        self._patch = monkeypatch

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Somebody looks."""
        ours, theirs = pty.openpty()
        held: list[bytes] = []

        def read() -> None:
            while True:
                try:
                    piece = os.read(ours, 65_536)
                except OSError:  # the other end is closed
                    return
                if not piece:
                    return
                held.append(piece)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            with self._patch.context() as patch, os.fdopen(theirs, "w") as file:
                patch.setattr(sys, "stderr", file)
                patch.setenv("TERM", "xterm-256color")
                patch.setenv("COLUMNS", "160")
                yield
        finally:
            reader.join()
            os.close(ours)
        self.seen = _STYLES.sub("", b"".join(held).decode())

    def run(self, *args: str) -> str:
        """A verb; what is seen of it meanwhile."""
        with self.looking():
            assert not app(list(args), standalone_mode=False)
        return self.seen


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(monkeypatch)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A job with something to check, and to clean."""
    found = (tmp_path / "state").as_uri()
    made = Folder(open_store(job_folder(found, JOB), new_id=new_id)).epochs(3, own=True)
    made.claim("host:2").epochs(2, base="files", own=True)
    return found


@pytest.fixture
def savepoint(tmp_path: Path) -> str:
    to = f"file://{tmp_path}/sp"
    states = {"count": ROWS, "other": ROWS}
    write_savepoint(to, {"counter": OperatorState(key="user string", states=states)})
    return to


def whole(seen: str, title: str, unit: str) -> bool:
    """Whether the bar came to its end: the last figures say as much as there is."""
    amount = r"([\d.,]+(?: \w*B)?)"
    figures = re.findall(rf"{title} +\S+ +{amount}/{amount}(?: {unit})?", seen)
    return bool(figures) and figures[-1][0] == figures[-1][1] != "0"


def test_verify_shows_the_bytes_up_to_the_last_one(
    terminal: Terminal, uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = terminal.run("verify", uri)
    assert whole(seen, f"verify {JOB}", "bytes"), seen
    assert "can be restored to epochs" in capsys.readouterr().out


def test_gc_shows_the_objects_that_it_deletes(terminal: Terminal, uri: str) -> None:
    seen = terminal.run("gc", uri, "--yes", "--min-age-s", "0")
    assert whole(seen, f"gc {JOB}", "objects"), seen


def test_verbs_on_savepoints_show_subtasks_rows_and_bytes(
    terminal: Terminal, savepoint: str, tmp_path: Path
) -> None:
    to = f"file://{tmp_path}"
    assert whole(terminal.run("savepoint", "describe", savepoint, "--verify"), "verify .*", "bytes")
    seen = terminal.run("savepoint", "edit", savepoint, "--to", f"{to}/edited")
    assert whole(seen, "edit", "subtasks"), seen
    keyed = ("--max-parallelism", "4")
    seen = terminal.run("savepoint", "edit", savepoint, "--to", f"{to}/keyed", *keyed)
    assert whole(seen, "edit", "subtasks"), seen
    seen = terminal.run("savepoint", "export", savepoint, "--to", f"{to}/files")
    assert whole(seen, "export", "subtasks"), seen
    assert "4 rows" in seen
    seen = terminal.run("savepoint", "import", f"{to}/files", "--to", f"{to}/back")
    assert whole(seen, "import", "bytes"), seen


def test_an_export_of_a_state_shows_what_is_fetched_and_what_is_written(
    terminal: Terminal, savepoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--savepoint", "--operator", "counter", "--state", "count")
    to = tmp_path / "rows.parquet"
    seen = terminal.run("state", "export", savepoint, *place, "--to", str(to))
    assert whole(seen, "fetch", "subtasks"), seen
    assert "2 rows" in seen
    assert capsys.readouterr().out == f"2 rows in {to}\n"


@pytest.mark.parametrize("quiet", ["--json", "--no-progress"])
def test_who_asks_for_none_gets_none(
    terminal: Terminal, uri: str, quiet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.run("verify", uri, quiet) == ""
    out = capsys.readouterr().out
    assert json.loads(out)["ok"] if quiet == "--json" else "can be restored" in out
    assert terminal.run("gc", uri, "--yes", "--min-age-s", "0", quiet) == ""


@pytest.mark.parametrize("verb", [("verify",), ("gc", "--yes", "--min-age-s", "0")])
def test_nothing_goes_into_a_pipe(
    uri: str, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = CliRunner().invoke(app, [*verb, uri])
    assert (done.exit_code, done.stderr) == (0, "")


def test_lines_are_told_above_the_bars_and_in_a_pipe_too(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.looking(), progress_bars() as bars:
        bars.add("drill", "steps")(1, 4)
        bars.say("epoch 0 [committed]")
    assert "epoch 0 [committed]" in terminal.seen
    assert "1/4 steps" in terminal.seen
    with progress_bars() as bars:
        bars.say("epoch 1")
    assert capsys.readouterr().err == "epoch 1\n"


def test_functions_tell_how_far_they_are_without_rich(savepoint: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    rows: list[tuple[int, int]] = []
    statebackend.export_savepoint(
        savepoint,
        f"file://{tmp_path}/files",
        progress=lambda *how: told.append(how),
        rows_progress=lambda *how: rows.append(how),
    )
    assert (told[0], told[-1], rows[-1]) == ((0, 1), (1, 1), (4, 0))


def test_a_total_that_is_not_known_is_not_shown(terminal: Terminal) -> None:
    with terminal.looking(), progress_bar("read", "rows") as progress:
        WorkDone(progress).add(1_200)
    assert "1,200 rows" in terminal.seen
    assert "/" not in terminal.seen.rpartition("1,200 rows")[0].rpartition("read")[2]
