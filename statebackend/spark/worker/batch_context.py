"""What a task knows of the micro-batch it runs in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
from pyspark import TaskContext

from snapshot.protocol.messages import Use
from statebackend.errors import WrongBatchError
from statebackend.rpc.session_endpoint import Credentials, Endpoint
from statebackend.runtime.worker.task_spec import JobPlace

__all__ = ["ENDPOINT_PROPERTY", "JOB_PROPERTY", "EpochContext", "job_place"]

# Spark writes local properties to event logs as they are: nothing secret may be in them.
ENDPOINT_PROPERTY: Final = "spark.statebackend.session"
JOB_PROPERTY: Final = "spark.statebackend.place"


@dataclass(frozen=True)
class EpochContext:
    """One task attempt's place: the epoch (Spark's batch id), the attempt, the coordinator.

    ``use``: what Spark evaluates the operator for.
    """

    epoch: int
    query_id: str
    attempt: int
    endpoint: Endpoint
    use: Use = field(default_factory=Use)

    @classmethod
    def current(cls, uid: str, credentials: Credentials) -> EpochContext:
        """Read off Spark's task context.

        Raises:
            WrongBatchError: the frame is not evaluated inside a batch of a query that the backend
                started.
        """
        task = TaskContext.get()
        if task is None:
            raise WrongBatchError(f"Operator {uid!r} ran outside a Spark task.")
        batch = task.getLocalProperty("streaming.sql.batchId")
        endpoint = task.getLocalProperty(ENDPOINT_PROPERTY)
        if batch is None:
            raise WrongBatchError(
                f"Operator {uid!r} was evaluated outside a micro-batch, or in a thread that Spark "
                f"gave no batch id.",
                todo="Use the frame inside the foreachBatch call itself, not in a thread pool (or "
                "wrap the function with pyspark.inheritable_thread_target).",
            )
        if endpoint is None:
            raise WrongBatchError(
                f"Operator {uid!r} runs in a query that was not started by its backend.",
                todo="Start it with backend.write_stream(frame) or backend.start(writer), or call "
                "statebackend.install(spark) before the frame is made.",
            )
        try:
            where = Endpoint.from_property(endpoint, credentials)
        except msgspec.MsgspecError as error:
            raise _unreadable(uid, error) from None
        return cls(
            epoch=int(batch),
            query_id=task.getLocalProperty("sql.streaming.queryId") or "",
            attempt=task.taskAttemptId(),
            endpoint=where,
            use=Use(
                task.stageId(),
                task.partitionId(),
                int(task.getLocalProperty("spark.sql.execution.id") or 0),
            ),
        )


def job_place(uid: str) -> JobPlace:
    """The job of the query that a task runs in, as its driver says.

    Raises:
        WrongBatchError: it says nothing that can be read.
    """
    task = TaskContext.get()
    text = (task.getLocalProperty(JOB_PROPERTY) if task else None) or ""
    try:
        return msgspec.json.decode(text, type=JobPlace)
    except msgspec.MsgspecError as error:
        raise _unreadable(uid, error) from None


def _unreadable(uid: str, error: Exception) -> WrongBatchError:
    return WrongBatchError(
        f"The session of operator {uid!r} does not parse ({type(error).__name__}).",
        todo="Install the same statebackend release on driver and executors.",
    )
