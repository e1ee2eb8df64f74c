"""Every kind of job, killed over and over at random moments: ``python -m tests.kills``.

Each round is a drill: a job in processes of its own, in which a driver, its JVM, an executor or a
Python worker gets SIGKILL, again as soon as the job has recovered; some are started again at
another parallelism. At the end every row is compared with a truth made without Spark. Prints the
kills that really happened, by job; exit 1 if a row is wrong or a kill was not made.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tests.kills.jobs import JOBS
from tests.kills.plan import Round, rounds
from tests.kills.strikes import ALL


@dataclass(frozen=True)
class Outcome:
    """What one round came to."""

    round: Round
    kills: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    wrong: str = ""
    seconds: float = 0.0


def lived(one: Round, folder: str) -> Outcome:
    """One round, in this process."""
    from recovery.drill.run.runner import run_drill

    began_s, root = time.monotonic(), Path(folder)
    with (root.parent / f"{root.name}.log").open("w") as log:

        def say(line: str) -> None:
            log.write(line + "\n")
            log.flush()

        try:
            report = run_drill(
                JOBS[one.job],
                faults=one.strikes,
                seed=one.seed,
                cluster=one.cluster,
                commit=one.commit,
                parallelism=one.parallelism,
                folder=root,
                on_progress=say,
            )
        except Exception as error:  # a round that cannot run is a failure of the whole
            say(f"{type(error).__name__}: {error}")
            return Outcome(one, wrong=str(error), seconds=time.monotonic() - began_s)
    kills = Counter(struck.fault for struck in report.faults if not struck.skipped)
    verdict, wrong = report.verdict, ""
    if not report.exact:
        found = [verdict.failure, *verdict.examples[:3], *map(str, report.not_struck.items())]
        wrong = "; ".join(filter(None, found))
    else:
        shutil.rmtree(root, ignore_errors=True)
    return Outcome(one, kills, verdict.found, wrong, time.monotonic() - began_s)


def run(planned: list[Round], *, jobs: int, until_s: float, folder: Path) -> list[Outcome]:
    """The rounds, a few at a time; none is begun after ``until_s``."""
    found: list[Outcome] = []
    waiting, running = list(planned), set[Future[Outcome]]()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        while waiting or running:
            while waiting and len(running) < jobs and time.monotonic() < until_s:
                place = str(folder / f"{len(found) + len(running):03}-{waiting[0].job}")
                running.add(pool.submit(lived, waiting.pop(0), place.replace(" ", "-")))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                found.append(one.result())
                _say(found[-1])
    return found


def _say(one: Outcome) -> None:
    verdict = f"NOT EXACT: {one.wrong}" if one.wrong else f"exact ({one.rows:,} rows)"
    kills = sum(one.kills.values())
    print(f"{one.seconds:6.0f} s  {kills} kills  {verdict}  {one.round.shown}", flush=True)


def summary(found: list[Outcome]) -> str:
    """The kills that happened: a line for each kind of job."""
    kinds = [fault.name for fault in ALL]
    lines = [f"{'job':22}" + "".join(f"  {kind}" for kind in kinds)]
    for job in dict.fromkeys(one.round.job for one in found):
        kills: Counter[str] = sum((o.kills for o in found if o.round.job == job), Counter())
        lines.append(f"{job:22}" + "".join(f"{kills[kind]:>{len(kind) + 2}}" for kind in kinds))
    return "\n".join(lines)


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=110)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="drills at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no round after these")
    parser.add_argument("--only", action="append", choices=sorted(JOBS), help="these jobs alone")
    parser.add_argument("--folder", type=Path, help="what is not exact is left in it")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    planned = list(rounds(given.only or list(JOBS), kills=given.kills, seed=given.seed))
    began_s = time.monotonic()
    until_s = began_s + 60 * given.minutes
    found = run(planned, jobs=given.jobs, until_s=until_s, folder=folder)
    kills = sum(sum(one.kills.values()) for one in found)
    wrong = [one for one in found if one.wrong]
    print(f"\n{summary(found)}\n")
    print(
        f"{kills} of {given.kills} kills in {len(found)} rounds, {len(wrong)} of them not exact, "
        f"{time.monotonic() - began_s:.0f} s"
    )
    if wrong:
        print(f"What is left of them is in {folder}.")
    return 1 if wrong or kills < given.kills else 0
