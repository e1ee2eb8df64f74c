"""Keyed and operator state on RocksDB for PySpark streaming.

Everything public is importable from here, from `snapshot` and `recovery` too. Names are looked up
when they are first used: importing this package starts nothing and opens nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recovery.drill.outcome import DrillReport as DrillReport
    from recovery.drill.runner import run_drill as run_drill
    from recovery.drill.scenario import DrillJob as DrillJob
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
    "CheckpointProgress": "snapshot.progress",
    "CoProcessor": "statebackend.api.processors",
    "DrillJob": "recovery.drill.scenario",
    "DrillReport": "recovery.drill.outcome",
    "KeyedProcessor": "statebackend.api.processors",
    "Keys": "statebackend.api.arrow",
    "ProcessorContext": "statebackend.api.context",
    "ProcessorTester": "statebackend.api.tester",
    "RescalePolicy": "statebackend.spark.scaling.policy",
    "Rescaler": "statebackend.spark.scaling.rescaler",
    "RestoreReport": "snapshot.messages",
    "Savepoint": "recovery.savepoint",
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
