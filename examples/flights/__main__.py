"""`python -m examples.flights`: the demo. `... driver DIR RUN` is how it starts its drivers."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from examples.flights import demo, show
from examples.flights.workdir import WorkDir
from statebackend.environment import require_java
from statebackend.errors import SettingError, StateBackendError

_TAIL_LINES = 30
_FILES = range(6, 100)  # Spark keeps the plans of a hundred epochs


def main(arguments: list[str]) -> int:
    """0: all as promised; 1: not; 2: it could not be started."""
    if arguments[:1] == ["driver"]:
        from examples.flights import driver

        driver.run(WorkDir(Path(arguments[1])), int(arguments[2]))
        return 0
    given = _parser().parse_args(arguments)
    try:
        if given.files not in _FILES:
            wanted = f"{_FILES[0]} to {_FILES[-1]}"
            raise SettingError(f"--files is {given.files}.", todo=f"Give {wanted}.")
        require_java()
        work = _work_dir(given.dir)
    except StateBackendError as error:
        print(error, file=sys.stderr)
        return 2
    code = 1
    try:
        code = _play(work, given.files)
    except KeyboardInterrupt:
        code = 130
    finally:
        if given.keep or code == 1:
            print(f"Kept: {work.root} (the drivers' log is {work.log.name})")
        else:
            shutil.rmtree(work.root)
    return code


def _play(work: WorkDir, files: int) -> int:
    console = Console(highlight=False, markup=False)
    try:
        outcome = demo.play(work, files, console)
    except demo.DemoError as error:
        lines = work.log.read_text(errors="replace").splitlines()
        print(f"{error} The end of its log, {work.log}:", file=sys.stderr)
        print("\n".join(lines[-_TAIL_LINES:]), file=sys.stderr)
        return 1
    except StateBackendError as error:
        print(error, file=sys.stderr)
        return 2
    show.conclude(console, outcome)
    return 1 if outcome.complaints else 0


def _work_dir(path: str | None) -> WorkDir:
    if path is None:
        return WorkDir(Path(tempfile.mkdtemp(prefix="flights-")))
    root = Path(path).absolute()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise SettingError(
            f"--dir {root} is there already, and not empty.",
            todo="Name a new directory: it is removed at the end, unless --keep is given.",
        )
    root.mkdir(parents=True, exist_ok=True)
    return WorkDir(root)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.flights",
        description="A year of flights, streamed with state per aircraft. The driver is killed "
        "twice; the result is compared with a batch computation.",
    )
    parser.add_argument("--dir", help="work directory (default: a new temporary one)")
    parser.add_argument("--keep", action="store_true", help="leave the work directory")
    parser.add_argument(
        "--files", type=int, default=40, help="files to stream, one per epoch (default: 40)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
