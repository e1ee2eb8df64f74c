"""The files for Prometheus and Grafana that come with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["DASHBOARD", "RULES"]

_FOLDER: Final = Path(__file__).parent
DASHBOARD: Final = _FOLDER / "grafana.json"
RULES: Final = _FOLDER / "alerts.yml"
