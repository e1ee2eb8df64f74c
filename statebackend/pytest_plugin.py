"""The pytest plugin: a marker and a fixture that run a drill on a query of yours.

    @pytest.mark.drill(faults=["executor-killed"], at_epoch=3)
    def test_my_query_survives_a_killed_executor(drill):
        drill(build, truth=truth)

pytest loads this module in every run where the package is installed, so before a drill is run it
imports nothing but pytest: not Spark or numpy, and nothing of `recovery`, a name that a project may
have for a package of its own. docs/quality/drills.md has the whole story.
"""

from __future__ import annotations

import fcntl
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from recovery.drill.jobs.drill_job import DrillJob
    from recovery.drill.report.drill_report import DrillReport

__all__ = ["Drill", "drill"]

MARKER: Final = (
    "drill(faults=(), at_epoch=None, seed=None, duration_s=None, cluster=None, commit='sync', "
    "store='file', parallelism=4, each=False, lenient=False): what the fixture `drill` does to a "
    "job; each=True makes a test of each fault; lenient=True skips what this machine cannot do"
)
TO_RUNNER: Final = (
    "faults",
    "at_epoch",
    "seed",
    "duration_s",
    "cluster",
    "commit",
    "store",
    "parallelism",
)
OURS: Final = ("each", "lenient")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options `--drill-seed` and `--drill-report`."""
    group = parser.getgroup("drill", "recovery drills (statebackend)")
    group.addoption(
        "--drill-seed", type=int, metavar="N", help="replay drills with this seed, as a report says"
    )
    group.addoption(
        "--drill-report", metavar="DIR", help="write each drill's report there, HTML and JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and find out now what a report will need later."""
    config.addinivalue_line("markers", MARKER)
    if config.getoption("drill_report") and find_spec("jinja2") is None:
        from statebackend.texts import install_extra

        raise pytest.UsageError(f"--drill-report needs jinja2. {install_extra('drill')}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With `each=True`, a test of each fault."""
    if "drill" not in metafunc.fixturenames:
        return
    asked = _asked(metafunc.definition)
    if asked.get("each"):
        faults = _listed(asked.get("faults"))
        if not faults:
            pytest.fail("`drill` with each=True needs faults", pytrace=False)
        metafunc.parametrize("drill", faults, ids=map(_name, faults), indirect=True)


def _asked(node: pytest.Item) -> dict[str, Any]:
    """What the markers ask for; those nearer to the test beat those of its class and module."""
    asked: dict[str, Any] = {}
    for mark in node.iter_markers("drill"):
        if len(mark.args) > 1:
            pytest.fail("name all arguments of `drill` but the faults", pytrace=False)
        given = {"faults": mark.args[0], **mark.kwargs} if mark.args else mark.kwargs
        for name, value in given.items():
            if name not in TO_RUNNER + OURS:
                names = ", ".join(TO_RUNNER + OURS)
                pytest.fail(f"`drill` takes no {name!r}, but {names}", pytrace=False)
            asked.setdefault(name, value)
    return asked


def _listed(faults: Any) -> list[Any]:
    """Faults as `run_drill` takes them: a name, a `DrillFault`, a `Strike`, or several of these."""
    if faults is None:
        return []
    alone = isinstance(faults, str) or not isinstance(faults, Iterable)
    return [faults] if alone else list(faults)


def _name(fault: Any) -> str:
    """Of a name, a `DrillFault` or a `Strike`."""
    fault = getattr(fault, "fault", fault)
    return str(getattr(fault, "name", fault))


@pytest.fixture
def drill(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Drill:
    """Run a drill as the test's marker says: `drill(job, truth=...)`."""
    asked = _asked(request.node)
    if asked.pop("each", False):
        asked["faults"] = (request.param,)
    # Of all of xdist's workers, if it is one of them.
    shared = (
        tmp_path_factory.getbasetemp().parent if hasattr(request.config, "workerinput") else None
    )
    return Drill(request.node, tmp_path, shared, asked)


class Drill:
    """What the fixture gives. Call it with the job, as often as you like."""

    def __init__(
        self, item: pytest.Item, folder: Path, shared: Path | None, asked: dict[str, Any]
    ) -> None:
        self._item = item
        self._folder = folder
        self._shared = shared
        self._asked = asked
        self._runs = 0

    def __call__(
        self,
        job: DrillJob | str | Callable[..., Any],
        *,
        truth: Callable[[Path], Any] | None = None,
        **changed: Any,
    ) -> DrillReport:
        """Run the job, strike it, and compare what it put out with the truth.

        The test fails with the report if anything was lost, duplicated or wrong, if the job did not
        come to its end, or if a fault that was asked for could not be made; with `lenient=True` the
        test is skipped for the last.

        Args:
            job: a `DrillJob`, the name of a bundled one, or a function that builds the frame.
            truth: gives the right rows, for a function.
            changed: any argument of `run_drill` or of the marker, for this run.

        Returns:
            The report, for asserts of your own.
        """
        __tracebackhide__ = True
        _check_ours()
        import msgspec

        from recovery.drill.run import runner
        from recovery.drill.run.strike_schedule import drawn_seed

        self._runs += 1
        # None is what the runner takes for nothing said, wherever it has another default.
        said = {**self._asked, **changed}
        asked = {name: value for name, value in said.items() if value is not None}
        lenient = asked.pop("lenient", False)
        faults = _listed(asked.get("faults"))
        if faults:
            asked["faults"] = faults
        self._refuse_impossible(job, faults, asked, lenient=lenient)
        replayed = self._item.config.getoption("drill_seed")
        seed = replayed if replayed is not None else asked.pop("seed", None)
        asked["seed"] = drawn_seed() if seed is None else seed
        folder = asked.setdefault("folder", self._folder / f"drill-{self._runs}")
        asked.setdefault("on_progress", _tell)
        command = f"pytest '{self._nodeid()}' --drill-seed {asked['seed']}"
        self._item.user_properties.append(("drill_seed", asked["seed"]))
        self._say(f"replay: {command}\nfolder: {folder}")
        with _alone(self._shared):
            report = runner.run_drill(job, truth=truth, **asked)
        report = msgspec.structs.replace(report, command=command)
        self._keep(report)
        self._judge(report, lenient=lenient)
        return report

    def _say(self, text: str) -> None:
        self._item.add_report_section("call", "drill", text)

    def _refuse_impossible(
        self, job: Any, faults: list[Any], asked: dict[str, Any], *, lenient: bool
    ) -> None:
        """Not after minutes, but before the drill."""
        __tracebackhide__ = True
        from recovery.drill.jobs.bundled_jobs import kind_of
        from recovery.drill.run.drill_options import impossible

        options = {name: asked[name] for name in ("cluster", "store", "commit") if name in asked}
        reasons = impossible(faults, kind=kind_of(job), **options)
        text = _because(reasons)
        if reasons and not lenient:
            pytest.fail(text, pytrace=False)
        if reasons and len(reasons) == len({_name(fault) for fault in faults}):
            pytest.skip(text)

    def _nodeid(self) -> str:
        """The test's id, without what xdist puts behind it."""
        nodeid = self._item.nodeid
        for mark in self._item.iter_markers("xdist_group"):
            group = mark.args[0] if mark.args else mark.kwargs.get("name", "")
            nodeid = nodeid.removesuffix(f"@{group}")
        return nodeid

    def _keep(self, report: DrillReport) -> None:
        from recovery.drill.report.drill_report import json_text
        from recovery.drill.report.html_page import write_html

        folder = self._item.config.getoption("drill_report")
        if not folder:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        again = f"-{self._runs}" if self._runs > 1 else ""
        stem = re.sub(r"[^\w.]+", "-", self._nodeid()).strip("-") + again
        page = Path(folder) / f"{stem}.html"
        write_html(report, page)
        page.with_suffix(".json").write_text(json_text(report), encoding="utf-8")
        self._say(f"report: {page}")

    def _judge(self, report: DrillReport, *, lenient: bool) -> None:
        """Fail or skip the test; the report's text stands in its sections if it passes."""
        from recovery.drill.report.text_report import as_text

        text = as_text(report)
        if not report.verdict.exact:
            pytest.fail(text, pytrace=False)
        missing = report.not_struck
        reasons = _because(missing)
        if missing and lenient:
            pytest.skip(reasons)
        if missing:
            pytest.fail(f"The results are exact, but {reasons}.\n\n{text}", pytrace=False)
        self._say(text)


def _check_ours() -> None:
    """Fail the test if the project hides this library's package `recovery` with one of its own."""
    __tracebackhide__ = True
    if find_spec("recovery") is None or find_spec("recovery.drill") is None:
        pytest.fail(
            "Drills need this library's package `recovery`, and your project has another one of "
            "that name before it on Python's path. Run drills from another folder.",
            pytrace=False,
        )


def _because(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name} was not made: {why}" for name, why in reasons.items())


@contextmanager
def _alone(shared: Path | None) -> Iterator[None]:
    """One drill at a time among xdist's workers: each starts a cluster of its own."""
    if shared is None:
        yield
        return
    with (shared / "drill.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tell(line: str) -> None:
    """To the captured output: shown when the test fails, and at once with `-s`."""
    sys.stdout.write(line + "\n")
