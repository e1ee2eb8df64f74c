"""A package that is missing is one sentence, with the command that installs it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from statebackend.errors import EnvironmentMissingError
from statebackend.monitoring.observers import check_observers
from statebackend.settings import Settings


@pytest.mark.parametrize(
    ("settings", "package", "extra"),
    [
        ({"metrics_port": 9464}, "prometheus_client", "metrics"),
        ({"otel": 1}, "opentelemetry.trace", "otel"),
    ],
)
def test_what_is_not_installed_is_named(
    settings: dict[str, Any], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EnvironmentMissingError, match=rf"install '\.\[{extra}\]"):
        check_observers(Settings.resolve(settings, lambda key: None))


def test_nothing_is_needed_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    check_observers(Settings.resolve({}, lambda key: None))
