"""The page of this driver's jobs: one server for each address that settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from statebackend.errors import EnvironmentMissingError, SettingError
from statebackend.settings import Settings
from statebackend.system import SYSTEM, System
from statebackend.texts import install_extra
from statebackend.ui.job_figures import JobLine, JobView
from statebackend.ui.page_server import PageServer
from statebackend.ui.running_job_view import Observed, RunningJobView

__all__ = ["DriverPage", "check_installed", "driver_page"]


def check_installed() -> None:
    """Make sure that there is what the page needs.

    Raises:
        EnvironmentMissingError: jinja2 is not installed.
    """
    if find_spec("jinja2") is None:
        raise EnvironmentMissingError(
            "The page of jobs needs the package 'jinja2', which is not installed.",
            todo=install_extra("ui", "on the driver"),
        )


class DriverPage:
    """The jobs of this driver, and their page.

    Raises:
        EnvironmentMissingError: jinja2 is not installed.
        SettingError: the address is taken, or open to a network without a token.
    """

    where: Final = ""

    def __init__(self, host: str, port: int, token: str, system: System = SYSTEM) -> None:
        check_installed()
        from statebackend.ui.job_pages import JobSite

        self.token = token
        self._views: dict[str, RunningJobView] = {}  # by the job's folder
        site = JobSite(self, system.wall_ms)
        self._server = PageServer(site, host=host, port=port, token=token, threads=system.threads)
        self.url: Final = self._server.url

    def add(self, observed: Observed) -> None:
        """Show a job from now on; an earlier start of the same job is forgotten."""
        view = RunningJobView(observed)
        before = self._views.pop(view.uri, None)
        if before is not None:
            before.close()
        self._views[view.uri] = view

    def stop(self) -> None:
        """Serve nothing any more."""
        self._server.stop()

    def _named(self) -> dict[str, RunningJobView]:
        """By name; of several folders with a job of that name, the one that was started last."""
        return {view.job: view for view in list(self._views.values())}

    def lines(self) -> list[JobLine]:
        """See `Jobs`; asks no store."""
        return [
            JobLine(
                job=name,
                epoch=view.durable_epoch,
                size_bytes=None,
                written_ms=None,
                running=view.is_running,
            )
            for name, view in sorted(self._named().items())
        ]

    def view(self, job: str) -> JobView | None:
        """See `Jobs`."""
        return self._named().get(job)


_pages: Final[dict[tuple[str, int], DriverPage]] = {}
_lock: Final = SYSTEM.threads.lock()


def driver_page(
    settings: Settings, make: Callable[[str, int, str], DriverPage] = DriverPage
) -> DriverPage:
    """The one of this process at the address that settings name; made when first asked for.

    Raises:
        EnvironmentMissingError, SettingError: as `DriverPage`; or it has another token.
    """
    host, port, token = settings.ui_host, settings.ui_port, settings.ui_token
    with _lock:
        found = _pages.get((host, port))
        if found is None:
            found = _pages[host, port] = make(host, port, token)
        if found.token != token:
            raise SettingError(
                f"The page at {host}:{port} is served by this driver with another token.",
                todo="Give all jobs of a driver the same spark.statebackend.ui.token, or others "
                "another spark.statebackend.ui.port.",
            )
        return found
