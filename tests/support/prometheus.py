"""A Prometheus server on loopback, from Debian's package, with the alerts that we ship."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from statebackend.monitoring.shipped_files import RULES
from tests.support.servers import free_port

__all__ = ["Prometheus", "require", "start_prometheus"]

START_LIMIT_S = 30.0


def require(program: str) -> None:
    """Skip the test without a program of the package; `tox -e prometheus` lets it fail then."""
    if shutil.which(program) is None:
        reason = "Debian's package prometheus is not installed."
        if os.environ.get("STATEBACKEND_PROMETHEUS"):
            pytest.fail(reason)
        pytest.skip(reason)


class Prometheus:
    """The running process; it scrapes one port every second."""

    def __init__(self, folder: Path, target: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        scraped = {
            "job_name": "streaming",
            "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
        }
        config = {"global": every, "rule_files": [str(RULES)], "scrape_configs": [scraped]}
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._output = folder / "prometheus.out"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={path}",
                    f"--storage.tsdb.path={folder / 'series'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        until_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until_s and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"It did not start: {self._output.read_text(errors='replace')}")

    def asked(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as answer:
            return json.load(answer)["data"]

    def series(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now."""
        found: list[dict[str, Any]] = self.asked("query", query=expression)["result"]
        return found

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait(30)


def start_prometheus(folder: Path, target: int) -> Prometheus:
    """A server without data, in a folder."""
    require("prometheus")
    server = Prometheus(folder, target)
    try:
        server.wait()
    except BaseException:
        server.stop()
        raise
    return server
