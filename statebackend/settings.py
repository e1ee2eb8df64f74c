"""Settings: an argument beats a SparkSession key, a key beats the default.

`SETTINGS` is the table of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from statebackend._setting import PREFIX, Setting, no_such_setting
from statebackend._setting_table import SETTINGS

__all__ = ["ENABLED", "SETTINGS", "Origin", "Setting", "Settings", "check_keys"]

Origin = Literal["argument", "session key", "default"]

ENABLED: Final = PREFIX + "enabled"
"""Whether `statebackend.install` does anything; no setting of a backend's."""


@dataclass(frozen=True)
class Settings:
    """Every setting, resolved. Field names are those of `SETTINGS`.

    Attributes:
        origins: by field name, where its value came from.
    """

    uri: str
    local_dir: str
    parallelism: int
    max_parallelism: int
    commit: str
    repeatable_sources: str
    heartbeat: int
    rebalance: str
    rebalance_settle_s: float
    constant_bytes: int
    quick_frames: int
    follow_stores_bytes: int
    tls: int
    driver_host: str
    driver_bind: str
    driver_port: int
    metrics_host: str
    metrics_port: int
    otel: int
    ui_host: str
    ui_port: int
    ui_token: str = field(repr=False)
    record_limit_bytes: int
    inline_limit_bytes: int
    base_every_epochs: int
    base_apart_every_epochs: int
    base_apart_min_bytes: int
    base_apart_ratio: float
    base_whole_limit_bytes: int
    base_bytes_per_s: int
    base_lease_s: float
    retain_epochs: int
    clean_every_epochs: int
    clean_min_age_s: float
    input_budget_bytes: int
    overlay_budget_bytes: int
    open_stores: int
    idle_close_s: float
    lease_timeout_s: float
    attempt_timeout_s: float
    commit_timeout_s: float
    start_timeout_s: float
    block_cache_bytes: int
    write_buffer_bytes: int
    s3_endpoint: str
    s3_region: str
    s3_sse: str
    s3_kms_key_id: str
    s3_role_arn: str
    s3_ca_bundle: str
    s3_deadline_s: float
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def resolve(cls, arguments: Mapping[str, Any], conf: Callable[[str], str | None]) -> Settings:
        """Arguments (None: not given), then keys, then defaults.

        Args:
            arguments: by field name.
            conf: looks up a full key; None where it is not set.

        Raises:
            SettingError: an unknown name, or a value that is not allowed.
        """
        unknown = sorted(set(arguments) - set(SETTINGS))
        if unknown:
            raise no_such_setting(unknown[0], SETTINGS)
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        for name, setting in SETTINGS.items():
            given, origins[name] = arguments.get(name), "argument"
            if given is None:
                given, origins[name] = conf(PREFIX + setting.key), "session key"
            if given is None:
                given, origins[name] = setting.default, "default"
            values[name] = given if origins[name] == "default" else setting.parse(given)
        return cls(**values, origins=origins)

    def inline_budget_bytes(self, parallelism: int) -> int:
        """What one subtask's ack may carry: its share of the record, and never over the limit."""
        return min(self.inline_limit_bytes, self.record_limit_bytes // max(1, parallelism))


def check_keys(keys: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuse keys of a session that look like settings and are none.

    Args:
        keys: all of the session's. others: of ours that are no settings.

    Raises:
        SettingError: naming the key, and the one that may have been meant.
    """
    known = {PREFIX + setting.key for setting in SETTINGS.values()} | set(others)
    for key in sorted(keys):
        if key.startswith(PREFIX) and key not in known:
            raise no_such_setting(key, known)
