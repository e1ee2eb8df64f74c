"""What Spark's sessions are set to while a query is started; they are set back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pyspark.sql import SparkSession

from statebackend.spark.location import FILE_MANAGER

__all__ = ["set_for_a_start", "wanted_at_start"]

# Spark turns adaptive execution off for stateful queries of its own; ours would be planned three
# times in each batch, to the same plan.
_ALWAYS: Final = {
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    "spark.sql.adaptive.enabled": "false",
}
# Spark asks for a batch's size in bytes before each row of it, which takes a quarter of the JVM's
# time. Where the number of rows bounds it, it need not; this value says so.
_BATCH_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT: Final = str((1 << 31) - 1)


def wanted_at_start(*, narrow: bool, file_manager: str | None) -> dict[str, str]:
    """What a query takes along of its session.

    Args:
        narrow: all operators' rows are so narrow that their number bounds a batch's bytes.
        file_manager: see :meth:`CheckpointLocation.file_manager`.
    """
    settings = dict(_ALWAYS)
    if narrow:
        settings[_BATCH_BYTES] = _NO_LIMIT
    if file_manager is not None:
        settings[FILE_MANAGER] = file_manager
    return settings


@contextlib.contextmanager
def set_for_a_start(sessions: Sequence[SparkSession], wanted: Mapping[str, str]) -> Iterator[None]:
    """While open the sessions have these settings; what a user has set stays, but for `_ALWAYS`."""
    said = [(one, name, one.conf.get(name, None)) for one in sessions for name in wanted]
    for one, name, value in said:
        if name in _ALWAYS or value is None:
            one.conf.set(name, wanted[name])
    try:
        yield
    finally:
        for one, name, value in said:
            if value is None:
                one.conf.unset(name)
            else:
                one.conf.set(name, value)
