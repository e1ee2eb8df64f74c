"""Times and sizes in the forms of Spark's settings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from statebackend.errors import SettingError
from statebackend.spark_forms import bytes_of, seconds_of


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (10, 10.0),
        (0.5, 0.5),
        ("10", 10.0),
        ("10 seconds", 10.0),
        ("10s", 10.0),
        (" 1 Minute 30 Seconds ", 90.0),
        ("interval 2 hours", 7200.0),
        ("500ms", 0.5),
        ("1 week", 604800.0),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_a_time_is_a_number_a_text_of_sparks_or_a_timedelta(given: Any, seconds: float) -> None:
    assert seconds_of("it", given) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "given",
    ["soon", "10 parsecs", "1 month", "10 seconds or so", "", True, None, float("nan"), [1]],
)
def test_what_is_no_time_is_refused_by_name(given: Any) -> None:
    with pytest.raises(SettingError, match="checkpoint_interval is"):
        seconds_of("checkpoint_interval", given)


@pytest.mark.parametrize(("given", "size"), [(8192, 8192), ("64k", 65536), ("1 mb", 1 << 20)])
def test_a_size_is_a_number_or_a_text_of_sparks(given: Any, size: int) -> None:
    assert bytes_of("it", given) == size


@pytest.mark.parametrize("given", ["64 seconds", 0.5, "", None])
def test_what_is_no_size_is_refused_by_name(given: Any) -> None:
    with pytest.raises(SettingError, match="buffer_bytes is"):
        bytes_of("buffer_bytes", given)
