"""`statebackend metrics`: the files for Prometheus and Grafana that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from statebackend.monitoring.shipped_files import DASHBOARD, RULES

__all__ = ["app"]

app = typer.Typer(
    help="The dashboard for Grafana and the alerts for Prometheus.", no_args_is_help=True
)

OnlyPath = Annotated[bool, typer.Option("--path", help="Print where the file lies.")]


@app.command("dashboard")
def dashboard(path: OnlyPath = False) -> None:
    """Print the dashboard, to be imported into Grafana."""
    _say(DASHBOARD, path)


@app.command("rules")
def rules(path: OnlyPath = False) -> None:
    """Print the alerts, a file of rules for Prometheus."""
    _say(RULES, path)


def _say(file: Path, path: bool) -> None:
    print(file if path else file.read_text(encoding="utf-8").rstrip("\n"))
