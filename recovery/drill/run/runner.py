"""A drill from end to end: `run_drill`."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from recovery.drill.cluster.guard_process import guarded
from recovery.drill.cluster.live_processes import TOKEN
from recovery.drill.cluster.local_cluster import LOCAL_DIR, Cluster, open_cluster
from recovery.drill.driver.driver_messages import DriverConfig
from recovery.drill.faults import needs, shim
from recovery.drill.jobs import batch_sink as sink
from recovery.drill.jobs.bundled_jobs import has_timers
from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.named_functions import address_of
from recovery.drill.proxy.fault_proxy import FaultProxy
from recovery.drill.proxy.s3_server import BUCKET, S3Server, credentials
from recovery.drill.report.drill_report import (
    EXAMPLES_MAX,
    DrillReport,
    RequestCount,
    Struck,
    Verdict,
)
from recovery.drill.report.output_check import check
from recovery.drill.run.drill_options import DrillOptions, FaultLike, named_faults, named_job
from recovery.drill.run.live_stage import LiveStage, Setup
from recovery.drill.run.strike_schedule import drawn_seed, planned
from recovery.drill.run.striker import START_S, Striker
from recovery.drill.run.teardown import TidyStack, end, failure_text
from recovery.drill.savepoints.clones import check_savepoints
from statebackend.errors import SettingError
from statebackend.system import SYSTEM, System
from statebackend.work_done import Progress, WorkDone

__all__ = ["run_drill"]

_STRIKE_S: Final = 1200.0  # one fault, with all that is waited for
_END_S: Final = 600.0
_OTHER_STEPS: Final = 3  # than faults: see `progress` of `run_drill`
_AFTER_LAST: Final = 2  # inputs that are fed after the last recovery, at least


def run_drill(
    job: DrillJob | str | Callable[..., Any],
    *,
    truth: Callable[[Path], Iterable[Sequence[Any]]] | None = None,
    faults: FaultLike | Sequence[FaultLike] = (),
    at_epoch: int | None = None,
    duration_s: float | None = None,
    seed: int | None = None,
    cluster: str = "local-cluster[2,1,1024]",
    commit: Literal["sync", "async"] = "sync",
    store: str = "file",
    parallelism: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> DrillReport:
    """Run a job on a real cluster of processes, strike it, and check what it has put out.

    Args:
        job: a `DrillJob`, the name of a bundled one, or a function `build(spark, backend, folder)`
            of a module's top level that gives the streaming frame; then `truth` is needed.
        truth: `truth(folder)` gives the rows that the job must have put out, instead of the job's.
        faults: names as `statebackend drill list` shows them, faults, or strikes with their epochs.
        at_epoch: the faults strike once Spark has committed this epoch. None: the seed draws.
        duration_s: a random soak: faults (all that can be made here, if none are named) are drawn
            and strike, each after the recovery from the one before, until the time is over.
        seed: of all that is drawn: inputs, epochs, faults, targets. None: one is drawn.
        cluster: `two-hosts`, or a Spark master that needs no servers of its own.
        commit: as `StateBackend` has it.
        parallelism: subtasks. None: 4, or as many as a continuous job has task slots here.
        store: `file`; `s3`, a server on loopback; or an `s3://` URI, with `s3_endpoint` (plain
            HTTP) in the job's settings.
        folder: of all files; it is kept. None: a temporary one, removed if the results are exact.
        on_progress: is told a line of what happens, whenever something does.
        progress: told how many steps are done (a fault is one), and of how many; of a soak, of 0.

    Returns:
        the report; a job that fails, or is not exact, is no exception here.

    Raises:
        SettingError: the arguments cannot mean anything.
        DrillError: the cluster or the server that was asked for cannot be had.
    """
    _check_outermost()
    options = DrillOptions(
        job=named_job(job, truth),
        faults=named_faults(faults),
        at_epoch=at_epoch,
        duration_s=duration_s,
        seed=drawn_seed() if seed is None else seed,
        cluster=cluster,
        commit=commit,
        store=store,
        subtasks=parallelism,
        say=on_progress or (lambda line: None),
    )
    options.check()
    root = _empty(folder)
    report = _Drill(options, root, WorkDone(progress)).run()
    return report if folder is not None else _left(root, report)


def _left(root: Path, report: DrillReport) -> DrillReport:
    """Remove a temporary folder, or have the report say where it is: there is something to see."""
    if report.verdict.exact:
        shutil.rmtree(root, ignore_errors=True)
    else:
        report.warnings.append(f"The drill's folder was left for you to look at: {root}.")
    return report


def _check_outermost() -> None:
    if TOKEN in os.environ:
        raise SettingError(
            "run_drill was called in a driver of a drill, which imports the job's module.",
            todo="Call it under `if __name__ == '__main__':`.",
        )


def _empty(folder: str | os.PathLike[str] | None) -> Path:
    root = Path(folder or tempfile.mkdtemp(prefix="drill-")).resolve()
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise SettingError(
            f"The drill's folder {root} is not empty.", todo="Name a new or an empty folder."
        )
    return root


@dataclass(frozen=True)
class _Store:
    """Where the durable copies go, and what processes must know for it."""

    uri: str
    environment: dict[str, str]
    settings: dict[str, str] = field(default_factory=dict)
    proxy: FaultProxy | None = None


@dataclass
class _Drill:
    """One drill in its folder."""

    options: DrillOptions
    root: Path
    work: WorkDone
    failure: str = ""
    wrong_savepoints: list[str] = field(default_factory=list)
    system: System = SYSTEM

    def __post_init__(self) -> None:
        self.began_s = self.system.monotonic_s()
        began = datetime.datetime.fromtimestamp(self.system.wall_ms() // 1000, datetime.UTC)
        self.started_at = began.isoformat(timespec="seconds")

    def run(self) -> DrillReport:
        """Everything, in order; whatever was started has ended when it returns."""
        options = self.options
        token = f"drill-{os.getpid()}-{secrets.token_hex(4)}"
        with TidyStack() as stack:
            stack.enter_context(guarded(token))
            stage, cluster = self._set_up(stack, token)
            striker = Striker(stage, seed=options.seed, given=self.given)
            stack.enter_context(cluster)
            stage.feeder.start()
            stack.callback(stage.feeder.stop)
            try:
                self._strike_all(stage, striker)
            except Exception as error:  # whatever a feed or a fault raises: the report says it
                self.failure = failure_text(error)
                stage.say(f"given up: {self.failure}")
            stage.drivers.warnings += end(stage, cluster)
            verdict = self._verdict(stage)
        stage.drivers.warnings += stack.failures
        return self._report(stage, verdict, striker.struck)

    # --- before --------------------------------------------------------------------------------

    def _set_up(self, stack: contextlib.ExitStack, token: str) -> tuple[LiveStage, Cluster]:
        options, root = self.options, self.root
        pool = options.pool()
        shim_needed = any("compiler" in fault.needs for fault in pool)
        library = shim.build_shim(root / "shim") if shim_needed else None
        self.given = needs.Given(
            cluster=options.cluster,
            s3=options.s3,
            commit=options.commit,
            compiler=library is not None,
            timers=has_timers(options.job),
            kind=options.job.kind,
        )
        store = self._store(stack, token)
        environment = store.environment | {"PYTHONPATH": self._python_path()}
        control = None
        if library is not None:
            control = root / "shim" / "control"
            control.mkdir(parents=True, exist_ok=True)
            environment |= shim.environment(library, control)
        cluster = open_cluster(options.cluster, root, token, environment)
        setup = Setup(
            job=options.job,
            cluster=cluster,
            config=self._config(cluster.master, store),
            store=None if options.s3 else root / "store" / "drill",
            proxy=store.proxy,
            shim=control,
            seed=options.seed,
            subtasks_max=options.kind.subtasks_max(options.cluster),
            limit_s=START_S
            + _STRIKE_S * (len(options.faults) or 1)
            + (options.duration_s or 0.0)
            + _END_S,
            say=options.say,
            system=self.system,
        )
        return LiveStage(setup), cluster

    def _config(self, master: str, store: _Store) -> DriverConfig:
        options, root = self.options, self.root
        settings: dict[str, Any] = {**options.job.settings, **store.settings}
        conf = dict(options.job.conf)
        for fault in options.pool():
            if not needs.missing(fault, self.given):
                conf |= fault.conf
                settings |= fault.settings
        (root / "drivers").mkdir()
        return DriverConfig(
            root=str(root),
            master=master,
            uri=store.uri,
            local_dir=LOCAL_DIR,
            checkpoint=str(root / "checkpoint"),
            out=str(root / "out"),
            events="",
            stop=str(root / "stop"),
            build=address_of(options.job.build).name,
            parallelism=options.parallelism,
            commit=options.commit,
            settings=settings,
            conf=conf,
            kind=options.job.kind,
            start=dict(options.job.start),
        )

    def _store(self, stack: contextlib.ExitStack, token: str) -> _Store:
        options = self.options
        environment = dict(os.environ)
        if not options.s3:
            return _Store((self.root / "store").as_uri(), environment)
        if options.store == "s3":
            environment = {n: v for n, v in environment.items() if not n.startswith("AWS_")}
            environment |= credentials(self.root)
        proxy = stack.enter_context(FaultProxy(self._upstream(stack, token), seed=options.seed))
        settings = {"s3_endpoint": proxy.url}
        if "s3_region" not in options.job.settings:
            settings["s3_region"] = "us-east-1"
        place = f"s3://{BUCKET}" if options.store == "s3" else options.store.rstrip("/")
        return _Store(f"{place}/{token}", environment, settings, proxy)

    def _upstream(self, stack: contextlib.ExitStack, token: str) -> str:
        """The S3 server's `host:port`; a server is started where none was given."""
        if self.options.store != "s3":
            return self.options.upstream_given()
        return stack.enter_context(S3Server(self.root, {**os.environ, TOKEN: token})).address

    def _python_path(self) -> str:
        found = [path for path in sys.path if path]
        folder = address_of(self.options.job.build).folder
        if folder and folder not in found:
            found.append(folder)
        return os.pathsep.join(found)

    # --- meanwhile -----------------------------------------------------------------------------

    def _strike_all(self, stage: LiveStage, striker: Striker) -> None:
        options = self.options
        stage.say(f"seed {options.seed}")
        strikes = planned(options.faults, seed=options.seed, at_epoch=options.at_epoch)
        if options.duration_s is None:
            self.work.expect(len(strikes) + _OTHER_STEPS)
        stage.drivers.start()
        stage.until(
            lambda: stage.committed() >= 0 or stage.has_read_all(), "the first epoch", START_S
        )
        self.work.add()
        inputs = options.job.inputs
        if options.duration_s is None:
            for strike in strikes:
                striker.strike(strike)
                self.work.add()
        else:
            striker.soak(options.pool(), options.duration_s, named=bool(options.faults))
            inputs = 0
        stage.feeder.enough(max(inputs, stage.feeder.fed + (_AFTER_LAST if striker.struck else 0)))
        stage.finish(_END_S)
        stage.say("all input is read")
        self.work.add()
        self.wrong_savepoints = check_savepoints(stage, _END_S)

    # --- after ---------------------------------------------------------------------------------

    def _verdict(self, stage: LiveStage) -> Verdict:
        last = stage.committed()
        job = self.options.job
        rows = (row for _, row in self.options.kind.rows(self.root / "out", last))
        try:
            truth = list(job.truth(self.root))
        except Exception:
            if not self.failure:  # else there may be nothing to make it from
                raise
            truth = []
        schema = sink.schema_of(self.root / "out")
        verdict = check(truth, rows, keys=job.keys, failure=self.failure, schema=schema)
        if self.wrong_savepoints:
            examples = [*self.wrong_savepoints, *verdict.examples][:EXAMPLES_MAX]
            verdict = msgspec.structs.replace(verdict, exact=False, examples=examples)
        self.work.add()
        stage.say("exact" if verdict.exact else f"not exact: {verdict.failure or verdict.examples}")
        return verdict

    def _report(self, stage: LiveStage, verdict: Verdict, struck: list[Struck]) -> DrillReport:
        options = self.options
        counts = stage.proxy.counts() if stage.proxy is not None else {}
        return DrillReport(
            job=options.job.name,
            seed=options.seed,
            command="",
            cluster=options.cluster,
            store="s3" if options.s3 else "file",
            commit=options.commit,
            started_at=self.started_at,
            duration_s=self.system.monotonic_s() - self.began_s,
            verdict=verdict,
            faults=struck,
            drivers=[driver.life for driver in stage.drivers.every],
            epochs=stage.feeder.epochs,
            recoveries=[r for driver in stage.drivers.every for r in driver.recoveries],
            requests=[
                RequestCount(
                    verb=verb.value,
                    group=group.rstrip("/"),
                    requests=count.requests,
                    faulted=count.faulted,
                    in_bytes=count.in_bytes,
                    out_bytes=count.out_bytes,
                )
                for (verb, group), count in sorted(counts.items())
            ],
            warnings=stage.drivers.warnings,
            asked=options.names(),
        )
