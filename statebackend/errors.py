"""Typed errors. Each has a stable code, says what happened, to what, and what to do next.

The first digit of a code names the area: 1 use, 2 storage, 3 formats, 4 commit, 5 protocol,
6 local copies, 7 recovery, 8 drills. A code is never given to another error, in any release.
"""

from __future__ import annotations

from statebackend._error import StateBackendError, error_for_code, error_in_text

__all__ = [
    "BarrierMissingError",
    "BroadcastDivergedError",
    "BroadcastWriteError",
    "CheckpointLocationError",
    "CheckpointsFailedError",
    "CommitUnknownError",
    "ConnectorError",
    "CoordinatorUnreachableError",
    "CorruptionError",
    "DamagedInputError",
    "DrillError",
    "DuplicateUidError",
    "EnvironmentMissingError",
    "FencedError",
    "ForeignObjectError",
    "ForeignRowError",
    "FormatError",
    "HashMismatchError",
    "IncompleteEpochError",
    "JobRunningError",
    "KeyContextError",
    "LateOutputError",
    "LocalCopyError",
    "LocalDeltaError",
    "LocalDirError",
    "MaxParallelismChangedError",
    "MissingUidError",
    "NotReplayableError",
    "NotRestorableError",
    "NullKeyError",
    "ObjectNotFoundError",
    "OutputLostError",
    "OverdueError",
    "ParallelismError",
    "PeerLostError",
    "PlanError",
    "ProcessorError",
    "ProtocolError",
    "RescaleError",
    "RewindError",
    "SchemaError",
    "SettingError",
    "SparkConnectError",
    "SparkLostError",
    "StaleRequestError",
    "StateBackendError",
    "StateMismatchError",
    "StorageError",
    "StoreBusyError",
    "StoreCapabilityError",
    "StoreUnreachableError",
    "UnsupportedFormatError",
    "UnsupportedQueryError",
    "UnsupportedTypeError",
    "UsageError",
    "ValueMismatchError",
    "WrongBatchError",
    "error_for_code",
    "error_in_text",
]


# --- 1: use ----------------------------------------------------------------------------------


class UsageError(StateBackendError):
    """A call that cannot mean anything, refused where it is made."""

    code = "SB1000"


class SettingError(UsageError):
    """A setting or argument is missing, malformed or out of range."""

    code = "SB1001"


class SchemaError(UsageError):
    """A schema does not parse, or names a column that is not there."""

    code = "SB1002"


class UnsupportedTypeError(SchemaError):
    """A type that cannot be a key or a state value."""

    code = "SB1003"


class NullKeyError(UsageError):
    """A row whose key is null."""

    code = "SB1004"


class ValueMismatchError(UsageError):
    """A value (or output row) that does not fit its schema."""

    code = "SB1005"


class DuplicateUidError(UsageError):
    """A uid used by two operators of one job."""

    code = "SB1006"


class MissingUidError(UsageError):
    """The job has state of an operator that the query no longer has."""

    code = "SB1007"


class ParallelismError(UsageError):
    """Parallelism or max parallelism outside its range."""

    code = "SB1008"


class MaxParallelismChangedError(ParallelismError):
    """The max parallelism of a job is fixed for its life."""

    code = "SB1009"


class CheckpointLocationError(UsageError):
    """The query's checkpoint location and the job do not belong together."""

    code = "SB1010"


class SparkConnectError(UsageError):
    """Spark Connect sessions cannot run the backend."""

    code = "SB1011"


class EnvironmentMissingError(UsageError):
    """Java, or another part of the environment, is missing or too old."""

    code = "SB1012"


class UnsupportedQueryError(UsageError):
    """A query, source, sink or Spark setting with which results would not be exact."""

    code = "SB1013"


class ProcessorError(UsageError):
    """The user's processor raised an error, or cannot be sent to the executors."""

    code = "SB1014"


class KeyContextError(UsageError):
    """State was used outside the call for its key."""

    code = "SB1015"


class JobRunningError(UsageError):
    """Another query runs the job, or has continued it; or the checkpoint location is too old."""

    code = "SB1016"


class StateMismatchError(UsageError):
    """A state's name, kind or schema, or its initial state, is not what the checkpoint holds."""

    code = "SB1017"


class BroadcastWriteError(UsageError):
    """Broadcast state was written outside process_broadcast()."""

    code = "SB1018"


class PlanError(UnsupportedQueryError):
    """Spark would plan the query so that a subtask misses rows, or the barrier that ends them."""

    code = "SB1019"


class LateOutputError(UsageError):
    """An operator put out a row that the operators after it would drop as late."""

    code = "SB1021"


# --- 2: storage ------------------------------------------------------------------------------


class StorageError(StateBackendError):
    """The object store failed."""

    code = "SB2000"


class ObjectNotFoundError(StorageError):
    """No object under that name."""

    code = "SB2001"


class StoreUnreachableError(StorageError):
    """The store cannot be reached or written to."""

    code = "SB2002"


class StoreCapabilityError(StorageError):
    """The store lacks something that correctness needs."""

    code = "SB2003"


class ConnectorError(StorageError):
    """A source cannot reach or read its input, or a sink cannot reach or write its output."""

    code = "SB2004"


class OutputLostError(StorageError):
    """Output is gone, or is ahead of the query: it is not known what readers have seen."""

    code = "SB2005"


class OverdueError(ConnectorError):
    """A sink's commit, or a source's search for splits, did not end in time."""

    code = "SB2006"


# --- 3: formats ------------------------------------------------------------------------------


class FormatError(StateBackendError):
    """Bytes that are not what they should be."""

    code = "SB3000"


class CorruptionError(FormatError):
    """Bytes that were right once: truncated, flipped, or of another object."""

    code = "SB3001"


class UnsupportedFormatError(FormatError):
    """A format version that this release does not read."""

    code = "SB3002"


class DamagedInputError(FormatError):
    """Input that is not of its format, or does not fit the source's schema."""

    code = "SB3003"


# --- 4: commit -------------------------------------------------------------------------------


class FencedError(StateBackendError):
    """Another driver has taken over the job."""

    code = "SB4001"


class CommitUnknownError(StateBackendError):
    """A commit that may or may not have happened."""

    code = "SB4002"


# --- 5: protocol -----------------------------------------------------------------------------


class ProtocolError(StateBackendError):
    """A message that the protocol does not allow."""

    code = "SB5000"


class IncompleteEpochError(ProtocolError):
    """Spark went on, although the operator had not finished the epoch before."""

    code = "SB5001"


class WrongBatchError(ProtocolError):
    """A frame was evaluated outside its micro-batch."""

    code = "SB5002"


class BarrierMissingError(ProtocolError):
    """The input ended without its barrier, because a task before it failed or was killed."""

    code = "SB5003"


class ForeignRowError(ProtocolError):
    """A row of a key group that belongs to another subtask."""

    code = "SB5004"


class StaleRequestError(ProtocolError):
    """A request from an earlier run, generation or attempt."""

    code = "SB5005"


class CoordinatorUnreachableError(ProtocolError):
    """The coordinator in the driver does not answer."""

    code = "SB5006"


class HashMismatchError(ProtocolError):
    """Spark's plan and Python put one key into different key groups."""

    code = "SB5007"


class BroadcastDivergedError(ProtocolError):
    """The subtasks of an operator came to different broadcast states."""

    code = "SB5008"


class PeerLostError(ProtocolError):
    """Another process of the job is gone, does not answer, or closed the connection."""

    code = "SB5009"


class CheckpointsFailedError(ProtocolError):
    """More checkpoints in a row failed than `tolerable_failures` of a continuous job allows."""

    code = "SB5010"


class ForeignObjectError(ProtocolError):
    """What a subtask has saved names an object that is not its own."""

    code = "SB5011"


class SparkLostError(ProtocolError):
    """Spark's JVM behind this driver is gone, or its SparkContext is stopped."""

    code = "SB5012"


# --- 6: local copies -------------------------------------------------------------------------


class LocalDirError(StateBackendError):
    """The folder for local copies (`local_dir`) cannot be used."""

    code = "SB6001"


class LocalCopyError(StateBackendError):
    """A local copy is damaged or foreign."""

    code = "SB6002"


class StoreBusyError(LocalCopyError):
    """Another process, which does not answer, has a local store open."""

    code = "SB6003"


class LocalDeltaError(LocalCopyError):
    """A local delta is damaged. The local store beside it may be intact."""

    code = "SB6004"


# --- 7: recovery -----------------------------------------------------------------------------


class NotRestorableError(StateBackendError):
    """The objects that exist are not enough to restore the epoch that was asked for."""

    code = "SB7001"


class RewindError(StateBackendError):
    """The query would have to go back to an earlier batch, and cannot do so exactly."""

    code = "SB7002"


class RescaleError(StateBackendError):
    """A query could not be brought to another parallelism, or not be started again at all."""

    code = "SB7003"


class NotReplayableError(StateBackendError):
    """A source has lost or changed rows that it must give again."""

    code = "SB7004"


# --- 8: drills -------------------------------------------------------------------------------


class DrillError(StateBackendError):
    """A drill cannot be made as it was asked for, or did not end."""

    code = "SB8001"
