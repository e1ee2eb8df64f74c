"""Settings: an argument beats a SparkSession key, a key beats the default.

One table (`SETTINGS`) is the source of the keys, their checks and their page in the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from statebackend.errors import SettingError

__all__ = ["SETTINGS", "Setting", "Settings", "settings_table"]

PREFIX: Final = "spark.statebackend."


@dataclass(frozen=True)
class Setting:
    """One setting: its key below ``spark.statebackend.``, its default, its check, its meaning."""

    key: str
    default: Any
    kind: type
    meaning: str
    check: Callable[[Any], bool] = lambda value: True
    wants: str = ""

    def parse(self, value: Any) -> Any:
        """A checked value from a string or a value.

        Raises:
            SettingError: naming the key, the value and what is wanted.
        """
        try:
            parsed = self.kind(value)
        except (TypeError, ValueError, OverflowError):
            raise self._refused(value) from None
        if isinstance(value, bool) or (isinstance(value, float) and parsed != value):
            raise self._refused(value)
        if not self.check(parsed):
            raise self._refused(value)
        return parsed

    def _refused(self, value: Any) -> SettingError:
        wants = self.wants or f"a value of type {self.kind.__name__}"
        return SettingError(
            f"The setting {PREFIX}{self.key} (or the argument of that meaning) is {value!r}.",
            todo=f"Give {wants}: {self.meaning}",
        )


def _positive(value: Any) -> bool:
    return bool(value > 0)


def _parallelism(value: Any) -> bool:
    return bool(0 <= value <= 32768)


def _not_negative(value: Any) -> bool:
    return bool(value >= 0)


SETTINGS: Final[dict[str, Setting]] = {
    "local_dir": Setting(
        "localDir",
        "",
        str,
        "directory for task-local copies on each executor's host; "
        "environment variables of the executor are filled in",
    ),
    "parallelism": Setting(
        "parallelism",
        0,
        int,
        "subtasks per operator (0: spark.sql.shuffle.partitions)",
        _parallelism,
        "0 to 32768",
    ),
    "max_parallelism": Setting(
        "maxParallelism",
        0,
        int,
        "key groups, fixed for the job's life (0: by Flink's formula)",
        _parallelism,
        "0 to 32768",
    ),
    "commit": Setting(
        "commit",
        "sync",
        str,
        "when a batch may be committed by Spark: once it is durable (sync)",
        lambda value: value == "sync",
        "'sync'",
    ),
    "driver_host": Setting(
        "driver.host", "", str, "the name executors reach the coordinator by (spark.driver.host)"
    ),
    "driver_bind": Setting(
        "driver.bindAddress",
        "",
        str,
        "the address the coordinator listens on (spark.driver.bindAddress)",
    ),
    "driver_port": Setting(
        "driver.port",
        0,
        int,
        "the coordinator's port (0: any free one)",
        lambda value: 0 <= value < 65536,
        "a port",
    ),
    "record_limit_bytes": Setting(
        "recordLimitBytes",
        8 << 20,
        int,
        "how large the slices packed into one record may be",
        _positive,
        "a positive number of bytes",
    ),
    "inline_limit_bytes": Setting(
        "inlineLimitBytes",
        256 << 10,
        int,
        "how much a subtask may pack into a record; more becomes an object of its own",
        _not_negative,
        "a number of bytes",
    ),
    "base_every_epochs": Setting(
        "baseEveryEpochs",
        64,
        int,
        "a subtask writes its full state once in so many epochs",
        _positive,
        "a positive number",
    ),
    "base_limit_bytes": Setting(
        "baseLimitBytes",
        256 << 20,
        int,
        "no full state is written for a subtask that holds more",
        _not_negative,
        "a number of bytes",
    ),
    "lease_timeout_s": Setting(
        "leaseTimeoutSeconds",
        10.0,
        float,
        "how long a task waits for a local store that another "
        "process of its host holds, before it makes one of its own",
        _not_negative,
        "seconds",
    ),
    "commit_timeout_s": Setting(
        "commitTimeoutSeconds",
        600.0,
        float,
        "how long a task waits for its epoch to be durable",
        _positive,
        "seconds",
    ),
    "start_timeout_s": Setting(
        "startTimeoutSeconds",
        120.0,
        float,
        "how long tasks wait for the driver's checks at start",
        _positive,
        "seconds",
    ),
    "block_cache_bytes": Setting(
        "rocksdb.blockCacheBytes",
        64 << 20,
        int,
        "RocksDB's block cache per open store",
        _positive,
        "a positive number of bytes",
    ),
    "write_buffer_bytes": Setting(
        "rocksdb.writeBufferBytes",
        32 << 20,
        int,
        "RocksDB's write buffer per open store",
        _positive,
        "a positive number of bytes",
    ),
}


@dataclass(frozen=True)
class Settings:
    """Every setting, resolved. Field names are those of `SETTINGS`."""

    local_dir: str
    parallelism: int
    max_parallelism: int
    commit: str
    driver_host: str
    driver_bind: str
    driver_port: int
    record_limit_bytes: int
    inline_limit_bytes: int
    base_every_epochs: int
    base_limit_bytes: int
    lease_timeout_s: float
    commit_timeout_s: float
    start_timeout_s: float
    block_cache_bytes: int
    write_buffer_bytes: int

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
            raise SettingError(
                f"There is no setting {unknown[0]!r}.", todo=f"Use one of: {', '.join(SETTINGS)}."
            )
        values = {}
        for name, setting in SETTINGS.items():
            given = arguments.get(name)
            if given is None:
                given = conf(PREFIX + setting.key)
            values[name] = setting.default if given is None else setting.parse(given)
        return cls(**values)

    def inline_budget_bytes(self, parallelism: int) -> int:
        """What one subtask's ack may carry: its share of the record, and never over the limit."""
        return min(self.inline_limit_bytes, self.record_limit_bytes // max(1, parallelism))


def settings_table() -> str:
    """The settings as a Markdown table, for the documentation."""
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for setting in SETTINGS.values():
        default = setting.default if setting.default != "" else "(none)"
        rows.append(f"| `{PREFIX}{setting.key}` | {default} | {setting.meaning} |")
    return "\n".join(rows) + "\n"
