"""The table of all settings: the source of their keys, their checks and their page."""

from __future__ import annotations

from typing import Final

from statebackend._setting import Setting, not_negative, parallelism, positive, switch

__all__ = ["SETTINGS"]

SETTINGS: Final[dict[str, Setting]] = {
    "uri": Setting(
        "uri",
        "",
        str,
        "the folder of all jobs, file:///... or s3://... Without it, a query's state is in the "
        "query's checkpoint location",
    ),
    "local_dir": Setting(
        "localDir",
        "",
        str,
        "the folder for local copies of the state on each executor's host. It may name "
        "environment variables of the executor, such as $HOME. Without it: statebackend-<user> in "
        "the executor's first Spark local directory (LOCAL_DIRS on YARN, else spark.local.dir)",
    ),
    "parallelism": Setting(
        "parallelism",
        0,
        int,
        "how many subtasks an operator has. 0: as many as in the last run of a job that has a name "
        "(job=); otherwise spark.sql.shuffle.partitions if that is set, or the number of Spark's "
        "cores. A continuous job takes the cores",
        parallelism,
        "0 to 32768",
    ),
    "max_parallelism": Setting(
        "maxParallelism",
        0,
        int,
        "how many key groups a job has, fixed for its life (0: 1,024 without job=; with it 128, "
        "or more if the first parallelism is above 85)",
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
        "names of sources, separated by commas, to allow with asynchronous commits: they give the "
        "same rows for the same offsets even after Spark has committed the batch",
    ),
    "heartbeat": Setting(
        "heartbeat",
        1,
        int,
        "whether a batch without data runs when a timer is due (1), or timers wait for the next "
        "batch with data (0). You cannot change this setting after the first start: the "
        "heartbeat is one of the query's sources",
        switch,
        "0 or 1",
    ),
    "rebalance": Setting(
        "rebalance",
        "auto",
        str,
        "whether subtasks of a running query move to executors that join (auto), or only when you "
        "call backend.rebalance() (off)",
        lambda value: value in ("auto", "off"),
        "'auto' or 'off'",
    ),
    "rebalance_settle_s": Setting(
        "rebalanceSettleSeconds",
        10.0,
        float,
        "how long an executor must have been there before subtasks move to it",
        positive,
        "seconds",
    ),
    "constant_bytes": Setting(
        "constantBytes",
        1 << 20,
        int,
        "larger parts of a processor (pickled) are sent to a worker once. Its batches share them, "
        "and cannot write to them (0: none)",
        not_negative,
        "a number of bytes",
    ),
    "quick_frames": Setting(
        "quickFrames",
        1,
        int,
        "whether small DataFrames that a pandas processor makes of plain dicts are built in a "
        "faster way (1). A worker first compares it with pandas' own, and does not use it if they "
        "differ",
        switch,
        "0 or 1",
    ),
    "follow_stores_bytes": Setting(
        "followStoresBytes",
        8 << 20,
        int,
        "a store of at least this size stays in the worker that has it open, and the rows go "
        "there. A smaller store goes to the worker that Spark gave the task (0: every store does)",
        not_negative,
        "a number of bytes",
    ),
    "tls": Setting(
        "tls",
        0,
        int,
        "whether calls between executors and driver, and between the slots of a continuous job, "
        "use TLS (1, with the extra `tls`) or not (0)",
        switch,
        "0 or 1",
    ),
    "driver_host": Setting(
        "driver.host", "", str, "the name at which executors reach the driver (spark.driver.host)"
    ),
    "driver_bind": Setting(
        "driver.bindAddress",
        "",
        str,
        "the address on which the driver listens (spark.driver.bindAddress)",
    ),
    "driver_port": Setting(
        "driver.port",
        0,
        int,
        "the port on which the driver listens for executors (0: any free port)",
        lambda value: 0 <= value < 65536,
        "a port",
    ),
    "metrics_host": Setting(
        "metrics.host",
        "127.0.0.1",
        str,
        "the address on which the driver serves its metrics. Give 0.0.0.0 where Prometheus runs "
        "on another host: anybody who reaches the port can read the metrics",
    ),
    "metrics_port": Setting(
        "metrics.port",
        0,
        int,
        "the port on which the driver serves its metrics to Prometheus (0: it does not). It needs "
        "the extra `metrics`",
        lambda value: 0 <= value < 65536,
        "a port",
    ),
    "otel": Setting(
        "otel",
        0,
        int,
        "whether the driver gives its metrics, and a span for each epoch, to OpenTelemetry (1, "
        "with the extra `otel`) or not (0)",
        switch,
        "0 or 1",
    ),
    "ui_host": Setting(
        "ui.host",
        "127.0.0.1",
        str,
        "the address on which the driver serves the page of its jobs. Any other than this host's "
        "own needs `ui_token`",
    ),
    "ui_port": Setting(
        "ui.port",
        0,
        int,
        "the port on which the driver serves the page of its jobs (0: it does not). It needs the "
        "extra `ui`",
        lambda value: 0 <= value < 65536,
        "a port",
    ),
    "ui_token": Setting(
        "ui.token",
        "",
        str,
        "what a browser must know to be shown the page, of at least 16 characters (without it: "
        "whoever is on the driver's host sees the page)",
        lambda value: value == "" or len(value) >= 16,
        "16 characters or more",
        secret=True,
    ),
    "record_limit_bytes": Setting(
        "recordLimitBytes",
        8 << 20,
        int,
        "how large the parts of all subtasks in one record may be together",
        positive,
        "a positive number of bytes",
    ),
    "inline_limit_bytes": Setting(
        "inlineLimitBytes",
        256 << 10,
        int,
        "how large a subtask's part of a record may be. A larger one becomes an object of its own",
        not_negative,
        "a number of bytes",
    ),
    "base_every_epochs": Setting(
        "baseEveryEpochs",
        64,
        int,
        "after how many epochs a subtask saves its whole state again",
        positive,
        "a positive number",
    ),
    "base_apart_every_epochs": Setting(
        "baseApartEveryEpochs",
        256,
        int,
        "the same for state that is too large for a record, and is uploaded beside the log",
        positive,
        "a positive number",
    ),
    "base_apart_min_bytes": Setting(
        "baseApartMinBytes",
        16 << 20,
        int,
        "large state is saved whole when the changes since the last time are larger than this",
        not_negative,
        "a number of bytes",
    ),
    "base_apart_ratio": Setting(
        "baseApartRatio",
        0.5,
        float,
        "... and larger than this share of the state's size",
        not_negative,
        "a number",
    ),
    "base_whole_limit_bytes": Setting(
        "baseWholeLimitBytes",
        8 << 20,
        int,
        "state up to this size is uploaded as one object. Larger state is uploaded as RocksDB's "
        "own files, of which only new ones are sent",
        not_negative,
        "a number of bytes",
    ),
    "base_bytes_per_s": Setting(
        "baseBytesPerSecond",
        32 << 20,
        int,
        "how fast a worker uploads files of large state in the background (0: no limit)",
        not_negative,
        "a number of bytes",
    ),
    "base_lease_s": Setting(
        "baseLeaseSeconds",
        300.0,
        float,
        "how long a background upload may go without a sign of its worker before it is given up",
        positive,
        "seconds",
    ),
    "retain_epochs": Setting(
        "retainEpochs",
        1,
        int,
        "how many of the newest epochs the job keeps, so that they can be read or restored",
        positive,
        "a positive number",
    ),
    "clean_every_epochs": Setting(
        "cleanEveryEpochs",
        64,
        int,
        "after how many epochs the driver deletes again what no restart needs (0: never)",
        not_negative,
        "a number",
    ),
    "clean_min_age_s": Setting(
        "cleanMinAgeSeconds",
        600.0,
        float,
        "the driver deletes nothing younger than this, by the store's clock",
        not_negative,
        "seconds",
    ),
    "input_budget_bytes": Setting(
        "inputBudgetBytes",
        64 << 20,
        int,
        "how much of a batch's input a task keeps in memory. More goes through local disk",
        positive,
        "a positive number of bytes",
    ),
    "overlay_budget_bytes": Setting(
        "overlayBudgetBytes",
        64 << 20,
        int,
        "how much memory the changes of a batch may take. More goes to local disk",
        positive,
        "a positive number of bytes",
    ),
    "open_stores": Setting(
        "openStores",
        32,
        int,
        "how many stores a worker keeps open between batches (0: none)",
        not_negative,
        "a number",
    ),
    "idle_close_s": Setting(
        "idleCloseSeconds",
        30.0,
        float,
        "how long an open store may be unused before the worker closes it",
        positive,
        "seconds",
    ),
    "lease_timeout_s": Setting(
        "leaseTimeoutSeconds",
        10.0,
        float,
        "how long a task waits for a local store that another "
        "process of its host has open, before it restores a copy of its own",
        not_negative,
        "seconds",
    ),
    "attempt_timeout_s": Setting(
        "attemptTimeoutSeconds",
        0.0,
        float,
        "how long a task may take from the end of its input until its state is saved (0: no "
        "limit). Then Spark kills it and runs it again, with twice the time. For workers that "
        "freeze; not in continuous jobs",
        not_negative,
        "seconds",
    ),
    "commit_timeout_s": Setting(
        "commitTimeoutSeconds",
        600.0,
        float,
        "how long a batch waits until its state is durable, also while the store is down",
        positive,
        "seconds",
    ),
    "start_timeout_s": Setting(
        "startTimeoutSeconds",
        120.0,
        float,
        "how long tasks wait for the checks that the driver makes at the start",
        positive,
        "seconds",
    ),
    "block_cache_bytes": Setting(
        "rocksdb.blockCacheBytes",
        0,
        int,
        "the size of RocksDB's block cache, which all stores of a worker share (0: 64 to 256 MiB; "
        "the caches of all workers take up to an eighth of the host's or container's memory)",
        not_negative,
        "a number of bytes, or 0",
    ),
    "write_buffer_bytes": Setting(
        "rocksdb.writeBufferBytes",
        32 << 20,
        int,
        "the size of RocksDB's write buffer, for each open store",
        positive,
        "a positive number of bytes",
    ),
    "s3_endpoint": Setting(
        "s3.endpoint",
        "",
        str,
        "an S3 server that is not Amazon's, https://host:port or http://host:port",
    ),
    "s3_region": Setting("s3.region", "", str, "the bucket's region (without it: boto3's choice)"),
    "s3_sse": Setting(
        "s3.sse",
        "",
        str,
        "server-side encryption to ask for: AES256 or aws:kms",
        lambda value: value in ("", "AES256", "aws:kms"),
        "'', 'AES256' or 'aws:kms'",
    ),
    "s3_kms_key_id": Setting(
        "s3.kmsKeyId", "", str, "the key for aws:kms (without it: the account's own)"
    ),
    "s3_role_arn": Setting("s3.roleArn", "", str, "a role to assume through STS"),
    "s3_ca_bundle": Setting(
        "s3.caBundle", "", str, "a file of certificates to trust, at this path on every host"
    ),
    "s3_deadline_s": Setting(
        "s3.deadlineSeconds",
        60.0,
        float,
        "for how long one call to S3 is tried again",
        positive,
        "seconds",
    ),
}
