"""Settings: an argument beats a SparkSession key, a key beats the default.

One table (`SETTINGS`) is the source of the keys, their checks and their page in the documentation.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from statebackend._setting import PREFIX, Setting, not_negative, parallelism, positive, switch
from statebackend.errors import SettingError

__all__ = ["ENABLED", "SETTINGS", "Setting", "Settings", "check_keys"]

ENABLED: Final = PREFIX + "enabled"
"""Whether `statebackend.install` does anything; no setting of a backend's."""

SETTINGS: Final[dict[str, Setting]] = {
    "uri": Setting(
        "uri",
        "",
        str,
        "the folder of all jobs, file:///... or s3://...; without one a query's state lies in its "
        "checkpoint location",
    ),
    "local_dir": Setting(
        "localDir",
        "",
        str,
        "directory for task-local copies on each executor's host; "
        "environment variables of the executor are filled in. Without one: statebackend-<user> in "
        "the executor's temporary directory",
    ),
    "parallelism": Setting(
        "parallelism",
        0,
        int,
        "subtasks per operator (0: spark.sql.shuffle.partitions if that is set, else the cores "
        "that Spark has)",
        parallelism,
        "0 to 32768",
    ),
    "max_parallelism": Setting(
        "maxParallelism",
        0,
        int,
        "key groups, fixed for the job's life (0: by Flink's formula, or 1,024 where job= is not "
        "given)",
        parallelism,
        "0 to 32768",
    ),
    "commit": Setting(
        "commit",
        "sync",
        str,
        "when Spark may commit a batch: once it is durable (sync), or while its record is being "
        "written, at most one batch ahead (async: one round trip less in each batch; after a "
        "crash of the driver the query may go back by one batch)",
        lambda value: value in ("sync", "async"),
        "'sync' or 'async'",
    ),
    "repeatable_sources": Setting(
        "repeatableSources",
        "",
        str,
        "names of sources, by comma, that give the same rows for the same offsets although they "
        "were told that these are done: with asynchronous commits others are refused",
    ),
    "heartbeat": Setting(
        "heartbeat",
        1,
        int,
        "whether timers get batches of their own when there is no data (1) or wait for the next "
        "batch with data (0); it is one source more, so a job keeps it as it was",
        switch,
        "0 or 1",
    ),
    "rebalance": Setting(
        "rebalance",
        "auto",
        str,
        "whether the subtasks of a running query spread over executors that join it (auto), or "
        "only when backend.rebalance() is called (off)",
        lambda value: value in ("auto", "off"),
        "'auto' or 'off'",
    ),
    "rebalance_settle_s": Setting(
        "rebalanceSettleSeconds",
        10.0,
        float,
        "how long an executor must have been there before subtasks move to it by themselves",
        positive,
        "seconds",
    ),
    "constant_bytes": Setting(
        "constantBytes",
        1 << 20,
        int,
        "parts of a processor that are larger (pickled) are sent once, and shared by the epochs of "
        "a worker, which cannot write to them (0: none)",
        not_negative,
        "a number of bytes",
    ),
    "quick_frames": Setting(
        "quickFrames",
        1,
        int,
        "whether small DataFrames that a pandas processor makes of plain dicts take a short way to "
        "the same frame (1): it is compared with pandas' own first, and left if they differ",
        switch,
        "0 or 1",
    ),
    "follow_stores_bytes": Setting(
        "followStoresBytes",
        8 << 20,
        int,
        "a store of so many bytes stays in the worker that has it open, and its rows go there; a "
        "smaller one goes to the worker that Spark gave the task (0: every one does)",
        not_negative,
        "a number of bytes",
    ),
    "tls": Setting(
        "tls",
        0,
        int,
        "whether executors and driver, and the slots of a continuous job, speak TLS (1, with the "
        "extra `tls`) or in the clear (0)",
        switch,
        "0 or 1",
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
        positive,
        "a positive number of bytes",
    ),
    "inline_limit_bytes": Setting(
        "inlineLimitBytes",
        256 << 10,
        int,
        "how much a subtask may pack into a record; more becomes an object of its own",
        not_negative,
        "a number of bytes",
    ),
    "base_every_epochs": Setting(
        "baseEveryEpochs",
        64,
        int,
        "a subtask writes its full state once in so many epochs",
        positive,
        "a positive number",
    ),
    "base_apart_every_epochs": Setting(
        "baseApartEveryEpochs",
        256,
        int,
        "the same for state that is too large for a record: its full copy is uploaded apart",
        positive,
        "a positive number",
    ),
    "base_apart_min_bytes": Setting(
        "baseApartMinBytes",
        16 << 20,
        int,
        "large state is written in full when the changes since are over this",
        not_negative,
        "a number of bytes",
    ),
    "base_apart_ratio": Setting(
        "baseApartRatio",
        0.5,
        float,
        "... and over so many times its size",
        not_negative,
        "a number",
    ),
    "base_whole_limit_bytes": Setting(
        "baseWholeLimitBytes",
        8 << 20,
        int,
        "state up to this size is uploaded as one object, larger state as RocksDB's own files, of "
        "which only new ones are sent",
        not_negative,
        "a number of bytes",
    ),
    "base_bytes_per_s": Setting(
        "baseBytesPerSecond",
        32 << 20,
        int,
        "how fast a worker uploads files of large state, beside its batches (0: no limit)",
        not_negative,
        "a number of bytes",
    ),
    "base_lease_s": Setting(
        "baseLeaseSeconds",
        300.0,
        float,
        "an upload of full state that its worker has not renewed for so long has lapsed",
        positive,
        "seconds",
    ),
    "retain_epochs": Setting(
        "retainEpochs",
        1,
        int,
        "how many confirmed epochs stay restorable",
        positive,
        "a positive number",
    ),
    "clean_every_epochs": Setting(
        "cleanEveryEpochs",
        64,
        int,
        "what nobody needs any more is deleted once in so many epochs (0: never)",
        not_negative,
        "a number",
    ),
    "clean_min_age_s": Setting(
        "cleanMinAgeSeconds",
        600.0,
        float,
        "nothing younger is deleted, by the store's clock",
        not_negative,
        "seconds",
    ),
    "input_budget_bytes": Setting(
        "inputBudgetBytes",
        64 << 20,
        int,
        "how much of an epoch's input a task keeps in memory; more is sorted through local disk",
        positive,
        "a positive number of bytes",
    ),
    "overlay_budget_bytes": Setting(
        "overlayBudgetBytes",
        64 << 20,
        int,
        "how much memory an epoch's changes may take; more goes to local disk",
        positive,
        "a positive number of bytes",
    ),
    "open_stores": Setting(
        "openStores",
        32,
        int,
        "stores that a worker keeps open between batches (0: none)",
        not_negative,
        "a number",
    ),
    "idle_close_s": Setting(
        "idleCloseSeconds",
        30.0,
        float,
        "an open store that nobody used for so long is closed",
        positive,
        "seconds",
    ),
    "lease_timeout_s": Setting(
        "leaseTimeoutSeconds",
        10.0,
        float,
        "how long a task waits for a local store that another "
        "process of its host holds, before it makes one of its own",
        not_negative,
        "seconds",
    ),
    "attempt_timeout_s": Setting(
        "attemptTimeoutSeconds",
        0.0,
        float,
        "how long an attempt at an epoch may take from its begin to its ack (0: any time); then "
        "Spark kills it and runs the task again, with twice the time; for workers that freeze; "
        "micro-batches only",
        not_negative,
        "seconds",
    ),
    "commit_timeout_s": Setting(
        "commitTimeoutSeconds",
        600.0,
        float,
        "how long a task waits for its epoch to be durable, also while the store is down",
        positive,
        "seconds",
    ),
    "start_timeout_s": Setting(
        "startTimeoutSeconds",
        120.0,
        float,
        "how long tasks wait for the driver's checks at start",
        positive,
        "seconds",
    ),
    "block_cache_bytes": Setting(
        "rocksdb.blockCacheBytes",
        0,
        int,
        "RocksDB's block cache, one for all stores of a worker (0: by the memory of its host or "
        "container, of which all workers' caches take up to an eighth; 64 to 256 MiB)",
        not_negative,
        "a number of bytes, or 0",
    ),
    "write_buffer_bytes": Setting(
        "rocksdb.writeBufferBytes",
        32 << 20,
        int,
        "RocksDB's write buffer per open store",
        positive,
        "a positive number of bytes",
    ),
    "s3_endpoint": Setting(
        "s3.endpoint", "", str, "an S3 server that is not Amazon's, https://host:port"
    ),
    "s3_region": Setting("s3.region", "", str, "the bucket's region (boto3's choice)"),
    "s3_sse": Setting(
        "s3.sse",
        "",
        str,
        "server-side encryption to ask for: AES256 or aws:kms",
        lambda value: value in ("", "AES256", "aws:kms"),
        "'', 'AES256' or 'aws:kms'",
    ),
    "s3_kms_key_id": Setting("s3.kmsKeyId", "", str, "the key for aws:kms (the account's own)"),
    "s3_role_arn": Setting("s3.roleArn", "", str, "a role to assume through STS"),
    "s3_ca_bundle": Setting(
        "s3.caBundle", "", str, "a file of certificates to trust, at this path on every host"
    ),
    "s3_deadline_s": Setting(
        "s3.deadlineSeconds",
        60.0,
        float,
        "how long one call to S3 may go on trying",
        positive,
        "seconds",
    ),
}


@dataclass(frozen=True)
class Settings:
    """Every setting, resolved. Field names are those of `SETTINGS`."""

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
            close = difflib.get_close_matches(key, known, n=1)
            raise SettingError(
                f"There is no setting {key!r}.",
                todo=f"Did you mean {close[0]!r}?" if close else f"Use one of: {', '.join(known)}.",
            )
