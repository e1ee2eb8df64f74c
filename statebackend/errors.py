"""Typed errors. Each has a stable code, says what happened, to what, and what to do next.

The first digit of a code names the floor: 1 use, 2 storage, 3 formats, 4 commit, 5 protocol,
6 local copies, 7 recovery, 8 drills. A code is never given to another error, in any release.
"""

from __future__ import annotations

from statebackend._error import StateBackendError, error_for_code

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
    """An operator of the checkpoint that the query no longer has, or has none of."""

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
    """A query, source or Spark setting that the backend cannot make exact."""

    code = "SB1013"


class ProcessorError(UsageError):
    """The user's processor raised, or cannot be shipped."""

    code = "SB1014"


class KeyContextError(UsageError):
    """State used outside the call for its key."""

    code = "SB1015"


class JobRunningError(UsageError):
    """The job is already being run by this driver."""

    code = "SB1016"


class StateMismatchError(UsageError):
    """A state's name, kind or schema, or its initial state, is not what the checkpoint holds."""

    code = "SB1017"


class BroadcastWriteError(UsageError):
    """Broadcast state written where not all subtasks are given the same."""

    code = "SB1018"


class PlanError(UnsupportedQueryError):
    """Spark would plan the query so that a subtask misses rows, or the barrier that ends them."""

    code = "SB1019"


class LateOutputError(UsageError):
    """An operator put out a row that operators behind it would drop as late."""

    code = "SB1021"


# --- 2: storage ------------------------------------------------------------------------------


class StorageError(StateBackendError):
    """The object store failed."""

    code = "SB2000"


class ObjectNotFoundError(StorageError):
    """No object under that name."""

    code = "SB2001"


class StoreUnreachableError(StorageError):
    """The store cannot be reached, or not be written."""

    code = "SB2002"


class StoreCapabilityError(StorageError):
    """The store lacks something that correctness needs."""

    code = "SB2003"


class ConnectorError(StorageError):
    """What a source reads from, or a sink writes to, cannot be reached, read or written."""

    code = "SB2004"


class OutputLostError(StorageError):
    """Output that a checkpoint holds is gone, and nobody knows that it became visible."""

    code = "SB2005"


class OverdueError(ConnectorError):
    """A sink's commit, or a source's look for splits, did not come to its end in time."""

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
    """Spark went on although the operator did not finish the epoch before."""

    code = "SB5001"


class WrongBatchError(ProtocolError):
    """A frame evaluated outside the micro-batch it belongs to."""

    code = "SB5002"


class BarrierMissingError(ProtocolError):
    """The input ended without its barrier: the upstream failed or was killed."""

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
    """Another process of a continuous job is gone, does not answer, or hung up."""

    code = "SB5009"


class CheckpointsFailedError(ProtocolError):
    """More checkpoints of a continuous job failed in a row than are tolerable."""

    code = "SB5010"


class ForeignObjectError(ProtocolError):
    """A snapshot names an object that was neither made for it nor given to it."""

    code = "SB5011"


class SparkLostError(ProtocolError):
    """Spark's JVM behind this driver is gone, or its SparkContext is stopped."""

    code = "SB5012"


# --- 6: local copies -------------------------------------------------------------------------


class LocalDirError(StateBackendError):
    """The directory for task-local copies cannot be used."""

    code = "SB6001"


class LocalCopyError(StateBackendError):
    """A local copy is damaged or foreign."""

    code = "SB6002"


class StoreBusyError(LocalCopyError):
    """A local store is held by another process that does not answer."""

    code = "SB6003"


class LocalDeltaError(LocalCopyError):
    """A local delta is damaged; the store beside it need not be."""

    code = "SB6004"


# --- 7: recovery -----------------------------------------------------------------------------


class NotRestorableError(StateBackendError):
    """The epoch asked for cannot be restored from what is there."""

    code = "SB7001"


class RewindError(StateBackendError):
    """A rewind that is due cannot be done exactly."""

    code = "SB7002"


class RescaleError(StateBackendError):
    """A query could not be brought to another parallelism, or not be started again at all."""

    code = "SB7003"


class NotReplayableError(StateBackendError):
    """A source no longer has, or has changed, what it must give again."""

    code = "SB7004"


# --- 8: drills -------------------------------------------------------------------------------


class DrillError(StateBackendError):
    """A drill that cannot be made as it was asked for, or did not come to its end."""

    code = "SB8001"
