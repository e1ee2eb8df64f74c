"""What watches the jobs of a driver: the services that settings ask for, one of each in a process.

A service begins with the first query that asks for it, and lives as long as the process. So what is
known of a job that has failed can still be asked for.
"""

from __future__ import annotations

from typing import Protocol

from statebackend.monitoring.observed_job import ObservedJob
from statebackend.settings import Settings

__all__ = ["Observer", "check_observers", "observe", "prepare_observers"]


class Observer(Protocol):
    """A service that shows the jobs of this process."""

    def add(self, observed: ObservedJob) -> None:
        """Watch a job from now on; an earlier start of the same job is forgotten."""


def _observers(settings: Settings) -> list[Observer]:
    """The services that settings ask for; they are made when they are first asked for.

    Raises:
        SettingError, EnvironmentMissingError: a port is in use, or a package is not installed.
    """
    found: list[Observer] = []
    if settings.metrics_port:
        from statebackend.monitoring.prometheus_server import metrics_server

        found.append(metrics_server(settings.metrics_host, settings.metrics_port))
    if settings.otel:
        from statebackend.monitoring.opentelemetry_export import telemetry

        found.append(telemetry())
    if settings.ui_port:
        from statebackend.ui.driver_page import driver_page

        found.append(driver_page(settings))
    return found


def check_observers(settings: Settings) -> None:
    """Make sure that there is what the services need, before anything is opened.

    Raises:
        EnvironmentMissingError: a package is not installed.
    """
    if settings.metrics_port:
        from statebackend.monitoring import prometheus_server

        prometheus_server.check_installed()
    if settings.otel:
        from statebackend.monitoring import opentelemetry_export

        opentelemetry_export.check_installed()
    if settings.ui_port:
        from statebackend.ui import driver_page

        driver_page.check_installed()


def prepare_observers(settings: Settings) -> None:
    """Have the services ready before a job is claimed: what they lack is said here.

    Raises:
        SettingError, EnvironmentMissingError: a port is in use, or a package is not installed.
    """
    _observers(settings)


def observe(observed: ObservedJob) -> None:
    """Have a job that was started watched by the services that its settings ask for."""
    for one in _observers(observed.settings):
        one.add(observed)
