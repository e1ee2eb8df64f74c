"""The report as one HTML page. Needs jinja2; whatever comes from jobs is escaped by it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Final

from recovery.drill.report.drill_report import DrillReport
from recovery.drill.report.timeline import timeline
from recovery.drill.report.wording import how_it_went, verdict_line
from statebackend.errors import EnvironmentMissingError
from statebackend.texts import count, duration, install_extra, seconds, size

__all__ = ["check_page", "page", "write_html"]

TEMPLATES: Final = Path(__file__).parent / "templates"

# Drawn around 0,0. A shape of its own for each meaning: colour alone tells nobody enough.
SHAPES: Final = {
    "tick": "M-0.75-7h1.5v14h-1.5z",
    "struck": "M-6-6h12l-6 11z",
    "skipped": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0M-3.5 3.5l7-7",
    "local": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "mixed": "M0-6.5l6.5 6.5l-6.5 6.5l-6.5-6.5z",
    "durable": "M-4.5-4.5h9v9h-9z",
    "empty": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "killed": "M-4.5-4.5l9 9M-4.5 4.5l9-9",
    "failed": "M0-6l6 11h-12z",
    "finished": "M-5 0l4 4l7-8",
    "running": "",
}
LEGEND: Final = (
    ("struck", "fault struck"),
    ("skipped", "fault not made"),
    ("killed", "driver killed"),
    ("failed", "driver failed"),
    ("finished", "driver finished"),
    ("local", "from the local copy"),
    ("mixed", "local and durable"),
    ("durable", "from the durable copy"),
    ("empty", "nothing to recover"),
)


def check_page() -> None:
    """Find out, before a drill takes its minutes, whether `write_html` will work.

    Raises:
        EnvironmentMissingError: jinja2 is not installed (the extra `drill`).
    """
    try:
        import_module("jinja2")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("jinja2", "markupsafe"):
            raise
        raise EnvironmentMissingError(
            "The page of a drill needs the package 'jinja2', which is not installed.",
            todo=install_extra("drill"),
        ) from error


def write_html(report: DrillReport, path: Path) -> None:
    """Write the report as one page that needs no other file and no network.

    Raises:
        EnvironmentMissingError: jinja2 is not installed (the extra `drill`).
        OSError: the path cannot be written.
    """
    check_page()
    path.write_text(page(report), encoding="utf-8")


def page(report: DrillReport) -> str:
    """The whole page, with its styles and drawings in it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=count, duration=duration, seconds=seconds, size=size, how_it_went=how_it_went
    )
    lanes = timeline(report)
    drawn = {mark.shape for lane in lanes.lanes for row in lane.rows for mark in row.marks}
    return environment.get_template("report.html").render(
        report=report,
        verdict=report.verdict,
        line=verdict_line(report),
        timeline=lanes,
        shapes=SHAPES,
        legend=[(shape, text) for shape, text in LEGEND if shape in drawn],
    )
