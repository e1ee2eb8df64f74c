"""`statebackend drill`: what a job survives, tried on this machine.

The only verbs that start Spark, in processes of the drill's own.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.markup import escape
from rich.text import Text

from recovery.drill.jobs.named_functions import load
from recovery.drill.report.drill_report import json_text
from recovery.drill.report.html_page import check_page, write_html
from recovery.drill.report.text_report import as_text
from recovery.drill.run.strike_schedule import drawn_seed
from statebackend.cli.console_output import NoProgress, console, guarded, say_json
from statebackend.cli.progress_bars import progress_bars
from statebackend.errors import SettingError

if TYPE_CHECKING:
    from recovery.drill.report.drill_report import DrillReport

__all__ = ["app"]

NOT_EXACT: Final = 1
INTERRUPTED: Final = 130
DEFAULT_CLUSTER: Final = "local-cluster[2,1,1024]"
UNITS_S: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

app = typer.Typer(
    help="Run a job, make faults happen to it, and check every row of what it put out.",
    no_args_is_help=True,
)


class Commit(StrEnum):
    """The backend's `commit=`."""

    SYNC = "sync"
    ASYNC = "async"


Job = Annotated[
    str, typer.Argument(help="A bundled job, `module:function`, or `path/to/file.py:function`.")
]
Truth = Annotated[
    str, typer.Option("--truth", help="For a function: what gives the right rows, named as JOB is.")
]
Faults = Annotated[
    list[str] | None,
    typer.Option("--faults", help="Names with commas between. `drill list` has them."),
]
AtEpoch = Annotated[
    int | None, typer.Option("--at-epoch", min=-1, help="Strike once this epoch is committed.")
]
Lasting = Annotated[
    str, typer.Option("--for", help="Go on for 90s, 5m, 2h, with random faults (of --faults).")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Replay the drill of a report.")]
Cluster = Annotated[
    str, typer.Option("--cluster", help="`two-hosts`, or a master like the default.")
]
Store = Annotated[
    str, typer.Option("--store", help="Of the durable copies: file, s3 (a server here), s3://URI.")
]
Committing = Annotated[Commit, typer.Option("--commit", help="The query's commit=.")]
Parallelism = Annotated[int | None, typer.Option("--parallelism", min=1, help="Subtasks.")]
ReportDir = Annotated[
    Path | None,
    typer.Option("--report", help="Write report.html and report.json into this folder."),
]
Keep = Annotated[
    Path | None,
    typer.Option("--keep", help="Run in this folder and leave it: input, logs, state."),
]
Lenient = Annotated[
    bool, typer.Option("--lenient", help="Exit 0 also where a fault could not be made here.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.command("list")
@guarded
def list_drills(as_json: AsJson = False) -> None:
    """The bundled jobs, and the faults: what happens, what is promised, what each needs."""
    from recovery.drill.catalogue import ALL
    from recovery.drill.jobs.bundled_jobs import BUNDLED

    if as_json:
        jobs = [{"name": name, "summary": job.summary} for name, job in BUNDLED.items()]
        faults = [
            {
                "name": name,
                "summary": fault.summary,
                "promise": fault.promise,
                "needs": sorted(fault.needs),
            }
            for name, fault in ALL.items()
        ]
        say_json(jobs=jobs, faults=faults)
        return
    out = console()
    out.print("[bold]Jobs[/]")
    for name, job in BUNDLED.items():
        out.print(f"\n[bold]{name}[/]\n  {escape(job.summary)}")
    out.print("\n[bold]Faults[/]")
    for name, fault in ALL.items():
        needs = f"  (needs {', '.join(sorted(fault.needs))})" if fault.needs else ""
        out.print(f"\n[bold]{name}[/]{needs}")
        out.print(f"  {escape(fault.summary)}\n  [dim]Promised:[/] {escape(fault.promise)}")


@app.command("run")
@guarded
def run_one(
    job: Job = "",
    truth: Truth = "",
    faults: Faults = None,
    at_epoch: AtEpoch = None,
    lasting: Lasting = "",
    seed: Seed = None,
    cluster: Cluster = DEFAULT_CLUSTER,
    store: Store = "file",
    commit: Committing = Commit.SYNC,
    parallelism: Parallelism = None,
    report: ReportDir = None,
    keep: Keep = None,
    lenient: Lenient = False,
    as_json: AsJson = False,
    no_progress: NoProgress = False,
) -> None:
    """Run a drill. Exit status: 0 exact, 1 not, or a fault was not made, 2 could not run."""
    from recovery.drill.jobs.bundled_jobs import kind_of

    names = _fault_names(faults)
    told: dict[str, Any] = {
        "faults": names,
        "at_epoch": at_epoch,
        "duration_s": _seconds(lasting) if lasting else None,
        "seed": drawn_seed() if seed is None else seed,
        "cluster": cluster,
        "store": store,
        "commit": commit.value,
        "parallelism": parallelism,
    }
    found = _job(job, truth)
    _refuse_impossible(names, told, kind=kind_of(found[0]), lenient=lenient)
    if report is not None:
        check_page()  # now: a drill is too long to lose at its end
        report.mkdir(parents=True, exist_ok=True)
    command = _replay(found[2], truth, names, lasting, told)
    print(f"replay: {command}", file=sys.stderr)
    result = _run(found, told, keep, quiet=as_json or no_progress)
    result = msgspec.structs.replace(result, command=command)
    if report is not None:
        (report / "report.json").write_text(json_text(result), encoding="utf-8")
        write_html(result, report / "report.html")
    missing = _missing(result, soak=bool(lasting))
    ok = result.verdict.exact and (lenient or not missing)
    if as_json:
        say_json(ok=ok, not_struck=missing, report=result)
    else:
        _show(result, missing)
    if not ok:
        raise typer.Exit(NOT_EXACT)


# --- what was typed -------------------------------------------------------------------------------


def _fault_names(given: list[str] | None) -> tuple[str, ...]:
    """The faults, in the order typed."""
    return tuple(name.strip() for one in given or () for name in one.split(",") if name.strip())


def _refuse_impossible(
    names: tuple[str, ...], told: dict[str, Any], *, kind: str, lenient: bool
) -> None:
    """Not after minutes, but before the drill. Raises `SettingError`."""
    from recovery.drill.run.drill_options import impossible

    options = {name: told[name] for name in ("cluster", "store", "commit")}
    for name, reason in impossible(names, kind=kind, **options).items():
        if not lenient:
            raise SettingError(
                f"The fault {name} cannot be made in this drill: {reason}.",
                todo="Change the drill, leave the fault out, or say --lenient.",
            )


def _job(job: str, truth: str) -> tuple[Any, Any, str]:
    """What `run_drill` takes as its job and its truth, and what to type for the job."""
    from recovery.drill.jobs.bundled_jobs import BUNDLED
    from recovery.drill.jobs.drill_job import DrillJob
    from recovery.drill.run.drill_options import check_name

    job = job or next(iter(BUNDLED))
    if ":" not in job:
        check_name(job, BUNDLED, kind="job")
        return job, None, job
    found = load(job)
    if not isinstance(found, DrillJob) and not truth:
        raise SettingError(
            f"{job} is a function, and nothing says what is right.",
            todo="Give --truth, or name a DrillJob.",
        )
    return found, load(truth, home=job.rpartition(":")[0]) if truth else None, job


def _seconds(text: str) -> float:
    """90, 90s, 5m, 1h30m, in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh]?)", text)
    amount_s = sum(float(number) * UNITS_S[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or amount_s <= 0:
        raise SettingError(f"{text!r} is no span of time.", todo="Write it like 90s, 5m or 1h30m.")
    return amount_s


def _replay(
    job: str, truth: str, faults: tuple[str, ...], lasting: str, told: dict[str, Any]
) -> str:
    """What to type to have this drill again."""
    words = ["statebackend", "drill", "run", job]
    options = {
        "--truth": truth,
        "--faults": ",".join(faults),
        "--at-epoch": told["at_epoch"],
        "--for": lasting,
        "--seed": told["seed"],
        "--cluster": told["cluster"] if told["cluster"] != DEFAULT_CLUSTER else None,
        "--store": told["store"] if told["store"] != "file" else None,
        "--commit": told["commit"] if told["commit"] != Commit.SYNC.value else None,
        "--parallelism": told["parallelism"],
    }
    for option, value in options.items():
        if value not in (None, ""):
            words += [option, str(value)]
    return shlex.join(words)


# --- the run --------------------------------------------------------------------------------------


def _run(
    found: tuple[Any, Any, str], told: dict[str, Any], keep: Path | None, *, quiet: bool
) -> DrillReport:
    """Run it, saying how far it is. Interrupted, it ends with status 130.

    The drill's folder goes with it, unless it was asked for or something is to be looked at there.
    """
    from recovery.drill.run import runner

    job, truth, name = found
    folder = keep or Path(tempfile.mkdtemp(prefix="drill-"))
    leave = True
    try:
        with _termination_interrupts(), progress_bars(quiet=quiet) as bars:
            told |= {"on_progress": bars.say, "progress": bars.add(f"drill of {name}", "steps")}
            report = runner.run_drill(job, truth=truth, folder=folder, **told)
        leave = keep is not None or not report.verdict.exact
        return report
    except KeyboardInterrupt:
        leave = keep is not None
        print("Interrupted; the drill's processes were ended.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if leave and folder.is_dir() and any(folder.iterdir()):
            print(f"kept: {folder}", file=sys.stderr)
        elif keep is None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: a CI that gives up must not leave clusters behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- the end --------------------------------------------------------------------------------------


def _missing(report: DrillReport, *, soak: bool) -> dict[str, str]:
    """The faults that were asked for and not made; a soak without names must have made one."""
    if soak and not report.asked and all(one.skipped for one in report.faults):
        return {"any": "no fault was made in the time that there was"}
    return report.not_struck


def _show(report: DrillReport, missing: dict[str, str]) -> None:
    verdict, _, rest = as_text(report).partition("\n")
    out = console()
    out.print(Text(verdict, style="bold green" if report.verdict.exact else "bold red"))
    out.print(Text(rest), end="")
    for name, reason in missing.items():
        print(f"The fault {name} was asked for and not made: {reason}.", file=sys.stderr)
