"""Keyed and operator state on RocksDB for PySpark streaming.

Everything public is importable from here, from `snapshot` and `recovery` too. Names are looked up
when they are first used: importing this package starts nothing and opens nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recovery.decide.restart_strategy import ExponentialDelay as ExponentialDelay
    from recovery.decide.restart_strategy import FailureRate as FailureRate
    from recovery.decide.restart_strategy import FixedDelay as FixedDelay
    from recovery.decide.restart_strategy import NoRestart as NoRestart
    from recovery.drill.jobs.drill_job import DrillJob as DrillJob
    from recovery.drill.report.drill_report import DrillReport as DrillReport
    from recovery.drill.run.runner import run_drill as run_drill
    from recovery.savepoints.savepoint import Savepoint as Savepoint
    from snapshot.log.checkpoint_progress import CheckpointProgress as CheckpointProgress
    from snapshot.log.progress_events import ContinuousCheckpoint as ContinuousCheckpoint
    from snapshot.protocol.messages import RestoreReport as RestoreReport
    from statebackend.api.arrow import ArrowContext as ArrowContext
    from statebackend.api.arrow import ArrowProcessor as ArrowProcessor
    from statebackend.api.arrow import Keys as Keys
    from statebackend.api.context import ProcessorContext as ProcessorContext
    from statebackend.api.processors import BroadcastProcessor as BroadcastProcessor
    from statebackend.api.processors import CoProcessor as CoProcessor
    from statebackend.api.processors import KeyedProcessor as KeyedProcessor
    from statebackend.backend import StateBackend as StateBackend
    from statebackend.cli.progress_bars import progress_bar as progress_bar
    from statebackend.continuous.driver.continuous_query import ContinuousQuery as ContinuousQuery
    from statebackend.continuous.kafka.kafka_protobuf import ProtobufValue as ProtobufValue
    from statebackend.continuous.kafka.kafka_values import AvroValue as AvroValue
    from statebackend.continuous.sinks.callback_sink import CallbackSink as CallbackSink
    from statebackend.continuous.sinks.collect_sink import CollectSink as CollectSink
    from statebackend.continuous.sinks.delta_sink import DeltaSink as DeltaSink
    from statebackend.continuous.sinks.file_sink import FileSink as FileSink
    from statebackend.continuous.sinks.iceberg_sink import IcebergSink as IcebergSink
    from statebackend.continuous.sinks.kafka_sink import KafkaSink as KafkaSink
    from statebackend.continuous.sinks.sink import Committer as Committer
    from statebackend.continuous.sinks.sink import Sink as Sink
    from statebackend.continuous.sinks.sink import SinkContext as SinkContext
    from statebackend.continuous.sinks.sink import SinkWriter as SinkWriter
    from statebackend.continuous.sources.file_source import FileSource as FileSource
    from statebackend.continuous.sources.generated_source import RangeSource as RangeSource
    from statebackend.continuous.sources.kafka_source import KafkaSource as KafkaSource
    from statebackend.continuous.sources.nexmark_source import NexmarkSource as NexmarkSource
    from statebackend.continuous.sources.redis_source import RedisStreamSource as RedisStreamSource
    from statebackend.continuous.sources.source import Discovery as Discovery
    from statebackend.continuous.sources.source import Source as Source
    from statebackend.continuous.sources.source import Split as Split
    from statebackend.continuous.sources.source import SplitReader as SplitReader
    from statebackend.drop_in import install as install
    from statebackend.drop_in import uninstall as uninstall
    from statebackend.errors import StateBackendError as StateBackendError
    from statebackend.monitoring.progress_listener import ProgressListener as ProgressListener
    from statebackend.once_batches import BatchOnce as BatchOnce
    from statebackend.once_batches import once as once
    from statebackend.operators.aggregate.functions import (
        approx_count_distinct as approx_count_distinct,
    )
    from statebackend.operators.aggregate.functions import count_distinct as count_distinct
    from statebackend.operators.aggregate.functions import first as first
    from statebackend.operators.aggregate.functions import last as last
    from statebackend.operators.aggregate.functions import top_k as top_k
    from statebackend.operators.aggregate.windows import session as session
    from statebackend.operators.aggregate.windows import sliding as sliding
    from statebackend.operators.aggregate.windows import tumbling as tumbling
    from statebackend.scaling.rescale_policy import RescalePolicy as RescalePolicy
    from statebackend.scaling.rescaler import Rescaler as Rescaler
    from statebackend.spark.from_spark.import_spark import SparkImport as SparkImport
    from statebackend.spark.from_spark.import_spark import import_spark as import_spark
    from statebackend.spark.from_tables.write_savepoint import write_savepoint as write_savepoint
    from statebackend.spark.state_data_source import register as register
    from statebackend.state.ttl_cells import TTL as TTL
    from statebackend.tables.edit_savepoint import edit_savepoint as edit_savepoint
    from statebackend.tables.erase_keys import EraseReport as EraseReport
    from statebackend.tables.erase_keys import erase_keys as erase_keys
    from statebackend.tables.given_operators import OperatorState as OperatorState
    from statebackend.tables.portable.portable_export import export_savepoint as export_savepoint
    from statebackend.tables.portable.portable_import import import_savepoint as import_savepoint
    from statebackend.tables.read_changes import read_changes as read_changes
    from statebackend.tables.read_state import epochs as epochs
    from statebackend.tables.read_state import read_state as read_state
    from statebackend.tables.read_state import read_timers as read_timers
    from statebackend.tables.read_state import states as states
    from statebackend.testing.processor_tester import ProcessorTester as ProcessorTester

__version__ = "0.1.0"


def _check_siblings() -> None:
    """Refuse a module of the user's that hides one of the packages this one is made of.

    Raises:
        ImportError: naming it.
    """
    from statebackend.environment import RENAME_IT, hidden_package

    if hidden := hidden_package():
        name, found = hidden
        raise ImportError(
            f"statebackend needs its package {name!r}, and Python finds {found} under that name. "
            f"{RENAME_IT}"
        )


# public name -> the module it lives in
_EXPORTS: dict[str, str] = {
    "TTL": "statebackend.state.ttl_cells",
    "ArrowContext": "statebackend.api.arrow",
    "ArrowProcessor": "statebackend.api.arrow",
    "BatchOnce": "statebackend.once_batches",
    "AvroValue": "statebackend.continuous.kafka.kafka_values",
    "ProtobufValue": "statebackend.continuous.kafka.kafka_protobuf",
    "BroadcastProcessor": "statebackend.api.processors",
    "CallbackSink": "statebackend.continuous.sinks.callback_sink",
    "CheckpointProgress": "snapshot.log.checkpoint_progress",
    "CoProcessor": "statebackend.api.processors",
    "CollectSink": "statebackend.continuous.sinks.collect_sink",
    "Committer": "statebackend.continuous.sinks.sink",
    "ContinuousCheckpoint": "snapshot.log.progress_events",
    "ContinuousQuery": "statebackend.continuous.driver.continuous_query",
    "Discovery": "statebackend.continuous.sources.source",
    "DeltaSink": "statebackend.continuous.sinks.delta_sink",
    "DrillJob": "recovery.drill.jobs.drill_job",
    "DrillReport": "recovery.drill.report.drill_report",
    "ExponentialDelay": "recovery.decide.restart_strategy",
    "FailureRate": "recovery.decide.restart_strategy",
    "FileSink": "statebackend.continuous.sinks.file_sink",
    "FileSource": "statebackend.continuous.sources.file_source",
    "FixedDelay": "recovery.decide.restart_strategy",
    "IcebergSink": "statebackend.continuous.sinks.iceberg_sink",
    "KafkaSink": "statebackend.continuous.sinks.kafka_sink",
    "KafkaSource": "statebackend.continuous.sources.kafka_source",
    "KeyedProcessor": "statebackend.api.processors",
    "Keys": "statebackend.api.arrow",
    "NexmarkSource": "statebackend.continuous.sources.nexmark_source",
    "NoRestart": "recovery.decide.restart_strategy",
    "OperatorState": "statebackend.tables.given_operators",
    "ProcessorContext": "statebackend.api.context",
    "ProcessorTester": "statebackend.testing.processor_tester",
    "ProgressListener": "statebackend.monitoring.progress_listener",
    "RangeSource": "statebackend.continuous.sources.generated_source",
    "RedisStreamSource": "statebackend.continuous.sources.redis_source",
    "RescalePolicy": "statebackend.scaling.rescale_policy",
    "Rescaler": "statebackend.scaling.rescaler",
    "RestoreReport": "snapshot.protocol.messages",
    "Savepoint": "recovery.savepoints.savepoint",
    "Sink": "statebackend.continuous.sinks.sink",
    "SinkContext": "statebackend.continuous.sinks.sink",
    "SinkWriter": "statebackend.continuous.sinks.sink",
    "Source": "statebackend.continuous.sources.source",
    "Split": "statebackend.continuous.sources.source",
    "SplitReader": "statebackend.continuous.sources.source",
    "SparkImport": "statebackend.spark.from_spark.import_spark",
    "StateBackend": "statebackend.backend",
    "StateBackendError": "statebackend.errors",
    "approx_count_distinct": "statebackend.operators.aggregate.functions",
    "count_distinct": "statebackend.operators.aggregate.functions",
    "edit_savepoint": "statebackend.tables.edit_savepoint",
    "epochs": "statebackend.tables.read_state",
    "export_savepoint": "statebackend.tables.portable.portable_export",
    "first": "statebackend.operators.aggregate.functions",
    "import_savepoint": "statebackend.tables.portable.portable_import",
    "import_spark": "statebackend.spark.from_spark.import_spark",
    "install": "statebackend.drop_in",
    "last": "statebackend.operators.aggregate.functions",
    "once": "statebackend.once_batches",
    "progress_bar": "statebackend.cli.progress_bars",
    "read_changes": "statebackend.tables.read_changes",
    "read_state": "statebackend.tables.read_state",
    "read_timers": "statebackend.tables.read_state",
    "register": "statebackend.spark.state_data_source",
    "run_drill": "recovery.drill.run.runner",
    "session": "statebackend.operators.aggregate.windows",
    "sliding": "statebackend.operators.aggregate.windows",
    "states": "statebackend.tables.read_state",
    "top_k": "statebackend.operators.aggregate.functions",
    "tumbling": "statebackend.operators.aggregate.windows",
    "uninstall": "statebackend.drop_in",
    "EraseReport": "statebackend.tables.erase_keys",
    "erase_keys": "statebackend.tables.erase_keys",
    "write_savepoint": "statebackend.spark.from_tables.write_savepoint",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_siblings()  # not at import: pytest loads the plugin in projects that use nothing of this
    value: object = getattr(import_module(module), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
