"""Settings: an argument beats a key, a key beats the default, and what is wrong is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from statebackend.errors import SettingError
from statebackend.settings import SETTINGS, Settings, check_keys

PREFIX = "spark.statebackend."
OTHER = {int: 7, float: 7.5, str: "other"}


def resolve(
    arguments: dict[str, Any] | None = None, conf: dict[str, str] | None = None
) -> Settings:
    return Settings.resolve(arguments or {}, (conf or {}).get)


def other_value(name: str) -> Any:
    """A value that the setting takes and that is not its default."""
    special = {"commit": "async", "s3_sse": "AES256", "heartbeat": 0, "quick_frames": 0, "tls": 1}
    special |= {"otel": 1, "rebalance": "off", "ui_token": "a secret of 16 or more"}
    return special.get(name, OTHER[SETTINGS[name].kind])


@pytest.mark.parametrize("name", SETTINGS)
def test_an_argument_beats_a_key_beats_the_default(name: str) -> None:
    setting = SETTINGS[name]
    key = PREFIX + setting.key
    value = other_value(name)
    assert getattr(resolve(), name) == setting.default
    by_key = getattr(resolve(conf={key: str(value)}), name)
    assert by_key == value
    assert type(by_key) is setting.kind
    by_argument = getattr(resolve({name: value}, {key: str(setting.default)}), name)
    assert by_argument == value
    # An argument that was not given is None, as functions hand it on.
    assert getattr(resolve({name: None}, {key: str(value)}), name) == value


@pytest.mark.parametrize("name", [n for n in SETTINGS if SETTINGS[n].kind is not str])
@pytest.mark.parametrize("bad", ["", "many", "1,5", "-1", "nan"])
def test_a_bad_value_of_a_number_names_its_key_and_says_what_to_give(name: str, bad: str) -> None:
    key = PREFIX + SETTINGS[name].key
    with pytest.raises(SettingError) as caught:
        resolve(conf={key: bad})
    assert key in str(caught.value)
    assert repr(bad) in str(caught.value)
    assert SETTINGS[name].meaning in str(caught.value)
    with pytest.raises(SettingError, match=key):
        resolve({name: bad})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("commit", "never"),
        ("rebalance", "always"),
        ("commit", ""),
        ("commit", "SYNC"),
        ("driver_port", 65536),
        ("base_every_epochs", 0),
        ("record_limit_bytes", 0),
        ("commit_timeout_s", 0),
        ("block_cache_bytes", -1),
        ("write_buffer_bytes", 0),
        ("parallelism", []),
        ("lease_timeout_s", {}),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(SettingError, match=PREFIX + SETTINGS[name].key):
        resolve({name: bad})


@pytest.mark.parametrize("name", ["driver_port", "parallelism", "inline_limit_bytes"])
def test_zero_is_a_value_where_it_means_something(name: str) -> None:
    assert getattr(resolve({name: 0}, {PREFIX + SETTINGS[name].key: "5"}), name) == 0


@pytest.mark.parametrize("name", ["parallelism", "max_parallelism"])
def test_a_parallelism_over_the_limit_names_its_key(name: str) -> None:
    with pytest.raises(SettingError, match=PREFIX + SETTINGS[name].key):
        resolve({name: 32769})


@pytest.mark.parametrize("bad", [2.7, float("inf")])
def test_a_number_that_is_no_integer_is_not_cut_to_one(bad: float) -> None:
    with pytest.raises(SettingError, match=r"spark\.statebackend\.parallelism"):
        resolve({"parallelism": bad})


def test_an_argument_that_is_no_setting_is_named_beside_what_may_have_been_meant() -> None:
    with pytest.raises(SettingError, match=r"'paralelism'\. Did you mean 'parallelism'\?$"):
        resolve({"paralelism": 2})
    with pytest.raises(SettingError, match="no setting 'xyz'") as caught:
        resolve({"xyz": 2})
    assert all(name in str(caught.value) for name in SETTINGS)


def test_a_wrong_default_cannot_hide() -> None:
    for setting in SETTINGS.values():
        assert setting.parse(setting.default) == setting.default
        assert setting.parse(str(setting.default)) == setting.default


def test_every_setting_is_resolved_and_has_a_key_of_its_own() -> None:
    assert [field.name for field in dataclasses.fields(Settings)] == [*SETTINGS, "origins"]
    assert len({setting.key for setting in SETTINGS.values()}) == len(SETTINGS)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tls", "true", 1),
        ("heartbeat", " False ", 0),
        ("tls", True, 1),
        ("block_cache_bytes", "64m", 64 << 20),
        ("write_buffer_bytes", "1.5 GB", 3 << 29),
        ("constant_bytes", "512b", 512),
        ("inline_limit_bytes", "4k", 4096),
        ("commit_timeout_s", "10 minutes", 600.0),
        ("idle_close_s", "250ms", 0.25),
        ("start_timeout_s", "2h", 7200.0),
    ],
)
def test_a_value_may_have_the_form_that_sparks_settings_have(
    name: str, text: Any, value: Any
) -> None:
    assert getattr(resolve({name: text}), name) == value
    if isinstance(text, str):
        assert getattr(resolve(conf={PREFIX + SETTINGS[name].key: text}), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("parallelism", "4k"), ("block_cache_bytes", "10 minutes"), ("commit_timeout_s", "64m64")],
)
def test_a_unit_that_a_setting_does_not_have_is_refused(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=PREFIX + SETTINGS[name].key):
        resolve({name: text})


def test_a_misspelt_key_of_the_session_names_the_one_that_was_meant() -> None:
    keys = [f"{PREFIX}localDir", "spark.sql.shuffle.partitions", f"{PREFIX}enabled"]
    check_keys(keys, [f"{PREFIX}enabled"])
    with pytest.raises(
        SettingError, match=r"no setting 'spark\.statebackend\.commitTimeout'"
    ) as caught:
        check_keys([*keys, f"{PREFIX}commitTimeout"], [f"{PREFIX}enabled"])
    assert f"{PREFIX}commitTimeoutSeconds" in str(caught.value)


def test_a_path_may_be_given_as_one() -> None:
    assert resolve({"local_dir": Path("/fast/disk")}).local_dir == "/fast/disk"


@pytest.mark.parametrize(
    ("record_limit", "inline_limit", "parallelism", "budget"),
    [
        (8 << 20, 256 << 10, 1, 256 << 10),
        (8 << 20, 256 << 10, 32, 256 << 10),
        (8 << 20, 256 << 10, 64, 128 << 10),
        (100, 1000, 3, 33),
        (100, 0, 3, 0),
        (100, 1000, 101, 0),
        (100, 1000, 0, 100),
    ],
)
def test_what_all_subtasks_may_pack_fits_into_one_record(
    record_limit: int, inline_limit: int, parallelism: int, budget: int
) -> None:
    settings = resolve({"record_limit_bytes": record_limit, "inline_limit_bytes": inline_limit})
    assert settings.inline_budget_bytes(parallelism) == budget
    assert budget * parallelism <= record_limit
