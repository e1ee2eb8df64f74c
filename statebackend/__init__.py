"""Keyed and operator state on RocksDB for PySpark streaming.

Everything public is importable from here, from `snapshot` and `recovery` too. Names are looked up
when they are first used: importing this package starts nothing and opens nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recovery.drill.job import DrillJob as DrillJob
    from recovery.drill.outcome import DrillReport as DrillReport
    from recovery.drill.runner import run_drill as run_drill
    from recovery.restarting import ExponentialDelay as ExponentialDelay
    from recovery.restarting import FailureRate as FailureRate
    from recovery.restarting import FixedDelay as FixedDelay
    from recovery.restarting import NoRestart as NoRestart
    from recovery.savepoint import Savepoint as Savepoint
    from snapshot.messages import RestoreReport as RestoreReport
    from snapshot.progress import CheckpointProgress as CheckpointProgress
    from statebackend.aggregate.functions import approx_count_distinct as approx_count_distinct
    from statebackend.aggregate.functions import count_distinct as count_distinct
    from statebackend.aggregate.functions import first as first
    from statebackend.aggregate.functions import last as last
    from statebackend.aggregate.functions import session as session
    from statebackend.aggregate.functions import sliding as sliding
    from statebackend.aggregate.functions import top_k as top_k
    from statebackend.aggregate.functions import tumbling as tumbling
    from statebackend.api.arrow import ArrowContext as ArrowContext
    from statebackend.api.arrow import ArrowProcessor as ArrowProcessor
    from statebackend.api.arrow import Keys as Keys
    from statebackend.api.context import ProcessorContext as ProcessorContext
    from statebackend.api.processors import BroadcastProcessor as BroadcastProcessor
    from statebackend.api.processors import CoProcessor as CoProcessor
    from statebackend.api.processors import KeyedProcessor as KeyedProcessor
    from statebackend.api.tester import ProcessorTester as ProcessorTester
    from statebackend.continuous.query import ContinuousCheckpoint as ContinuousCheckpoint
    from statebackend.continuous.query import ContinuousQuery as ContinuousQuery
    from statebackend.continuous.sinks.base import Committer as Committer
    from statebackend.continuous.sinks.base import Sink as Sink
    from statebackend.continuous.sinks.base import SinkContext as SinkContext
    from statebackend.continuous.sinks.base import SinkWriter as SinkWriter
    from statebackend.continuous.sinks.callback import CallbackSink as CallbackSink
    from statebackend.continuous.sinks.collect import CollectSink as CollectSink
    from statebackend.continuous.sinks.files import FileSink as FileSink
    from statebackend.continuous.sources.base import Discovery as Discovery
    from statebackend.continuous.sources.base import Source as Source
    from statebackend.continuous.sources.base import Split as Split
    from statebackend.continuous.sources.base import SplitReader as SplitReader
    from statebackend.continuous.sources.files import FileSource as FileSource
    from statebackend.continuous.sources.generated import RangeSource as RangeSource
    from statebackend.continuous.sources.nexmark import NexmarkSource as NexmarkSource
    from statebackend.continuous.sources.redisstreams import RedisStreamSource as RedisStreamSource
    from statebackend.errors import StateBackendError as StateBackendError
    from statebackend.spark.backend import StateBackend as StateBackend
    from statebackend.spark.scaling.policy import RescalePolicy as RescalePolicy
    from statebackend.spark.scaling.rescaler import Rescaler as Rescaler
    from statebackend.state.ttl import TTL as TTL

__version__ = "0.1.0"

# public name -> the module it lives in
_EXPORTS: dict[str, str] = {
    "TTL": "statebackend.state.ttl",
    "ArrowContext": "statebackend.api.arrow",
    "ArrowProcessor": "statebackend.api.arrow",
    "BroadcastProcessor": "statebackend.api.processors",
    "CallbackSink": "statebackend.continuous.sinks.callback",
    "CheckpointProgress": "snapshot.progress",
    "CoProcessor": "statebackend.api.processors",
    "CollectSink": "statebackend.continuous.sinks.collect",
    "Committer": "statebackend.continuous.sinks.base",
    "ContinuousCheckpoint": "statebackend.continuous.query",
    "ContinuousQuery": "statebackend.continuous.query",
    "Discovery": "statebackend.continuous.sources.base",
    "DrillJob": "recovery.drill.job",
    "DrillReport": "recovery.drill.outcome",
    "ExponentialDelay": "recovery.restarting",
    "FailureRate": "recovery.restarting",
    "FileSink": "statebackend.continuous.sinks.files",
    "FileSource": "statebackend.continuous.sources.files",
    "FixedDelay": "recovery.restarting",
    "KeyedProcessor": "statebackend.api.processors",
    "Keys": "statebackend.api.arrow",
    "NexmarkSource": "statebackend.continuous.sources.nexmark",
    "NoRestart": "recovery.restarting",
    "ProcessorContext": "statebackend.api.context",
    "ProcessorTester": "statebackend.api.tester",
    "RangeSource": "statebackend.continuous.sources.generated",
    "RedisStreamSource": "statebackend.continuous.sources.redisstreams",
    "RescalePolicy": "statebackend.spark.scaling.policy",
    "Rescaler": "statebackend.spark.scaling.rescaler",
    "RestoreReport": "snapshot.messages",
    "Savepoint": "recovery.savepoint",
    "Sink": "statebackend.continuous.sinks.base",
    "SinkContext": "statebackend.continuous.sinks.base",
    "SinkWriter": "statebackend.continuous.sinks.base",
    "Source": "statebackend.continuous.sources.base",
    "Split": "statebackend.continuous.sources.base",
    "SplitReader": "statebackend.continuous.sources.base",
    "StateBackend": "statebackend.spark.backend",
    "StateBackendError": "statebackend.errors",
    "approx_count_distinct": "statebackend.aggregate.functions",
    "count_distinct": "statebackend.aggregate.functions",
    "first": "statebackend.aggregate.functions",
    "last": "statebackend.aggregate.functions",
    "run_drill": "recovery.drill.runner",
    "session": "statebackend.aggregate.functions",
    "sliding": "statebackend.aggregate.functions",
    "top_k": "statebackend.aggregate.functions",
    "tumbling": "statebackend.aggregate.functions",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
