"""Starting a query on a job: checks, the one-batch rewind, and the takeover.

The order is what matters. Everything that can be refused is refused before Spark starts anything;
the claim, which fences another driver, comes only when the query is known to be the job's own; and
tasks wait until all that is done.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from recovery.rewind import Verdict, decide_start
from snapshot.coordinator import Coordinator, OperatorSpec, operators_setting
from snapshot.lineage import resolve
from snapshot.record import Manifest
from statebackend import system
from statebackend.errors import (
    JobRunningError,
    MissingUidError,
    RewindError,
    StateBackendError,
    StateMismatchError,
    UnsupportedQueryError,
)
from statebackend.settings import Settings
from statebackend.spark.context import ENDPOINT_PROPERTY
from statebackend.spark.job import Job
from statebackend.spark.location import CheckpointLocation
from statebackend.spark.session import RunSession
from statebackend.spark.tws import StateDeclaration
from statebackend.spark.wire import Server

__all__ = ["Launch", "Operator"]

_log = logging.getLogger("statebackend.spark")
_CHECK = "spark.sql.streaming.unsupportedOperationCheck"
_KEY_STATE = ""  # the key's schema is kept beside the states', under a name no state can have


@dataclass(frozen=True)
class Operator:
    """An operator as the driver made it."""

    uid: str
    parallelism: int
    max_parallelism: int
    key_schema: StructType
    states: dict[str, StateDeclaration]

    def schemas(self) -> dict[str, str]:
        """What the checkpoint keeps of its types."""
        kept = {name: d.to_json() for name, d in self.states.items()}
        return {_KEY_STATE: self.key_schema.json(), **kept}


class _Services:
    """The driver's one server, and which jobs it is running."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    server: ClassVar[Server | None] = None
    running: ClassVar[dict[str, tuple[str, StreamingQuery]]] = {}

    @classmethod
    def get(cls, spark: SparkSession, settings: Settings) -> Server:
        with cls.lock:
            if cls.server is None:
                conf = spark.sparkContext.getConf()
                host = settings.driver_host or conf.get("spark.driver.host") or "127.0.0.1"
                bind = settings.driver_bind or conf.get("spark.driver.bindAddress") or host
                cls.server = Server(bind=bind, advertised=host, port=settings.driver_port)
            return cls.server


class Launch:
    """One start of one job's query."""

    def __init__(
        self,
        spark: SparkSession,
        job: Job,
        *,
        operators: Mapping[str, Operator],
        settings: Settings,
        allow_dropped_state: bool,
    ) -> None:
        self._spark, self._job = spark, job
        self._operators = dict(operators)
        self._settings = settings
        self._allow_dropped_state = allow_dropped_state
        self._log = job.log()
        self.session = RunSession(
            store=job.store, log=self._log, gate_timeout_s=settings.start_timeout_s
        )
        self._job_id = ""
        self._name = ""
        self._first_epoch: int | None = None

    # --- before Spark starts anything ----------------------------------------------------------

    def prepare(self, writer: DataStreamWriter | None) -> None:
        """Check everything that can be known before the start; do a due rewind."""
        self._refuse_running()
        manifests = self._log.manifests()
        self._specs = self._check_operators(manifests)
        options = _options(writer)
        for name in (
            "asyncprogresstrackingenabled",
            "_asyncprogresstrackingoverridesinksupportcheck",
        ):
            if options.get(name, "false").lower() == "true":
                raise UnsupportedQueryError(
                    "Asynchronous progress tracking is on: it merges batches on restart, and "
                    "state could not be exact.",
                    todo="Leave the option asyncProgressTrackingEnabled out.",
                )
        path = options.get("checkpointlocation") or self._spark.conf.get(
            "spark.sql.streaming.checkpointLocation", None
        )
        if options.get("checkpointlocation") is None and path and options.get("queryname"):
            path = f"{path}/{options['queryname']}"
        if path and writer is not None:
            location = CheckpointLocation(self._spark, path)
            self._first_epoch = self._check_location(location, manifests, rewind=True)
        # A new job is claimed before its first start, for its identity; nobody can be fenced by it.
        self._job_id = manifests[-1].job_id if manifests else self._log.claim().job_id

    def _refuse_running(self) -> None:
        session, query = _Services.running.get(self._job.store.uri, ("", None))
        if query is None:
            return
        if query.isActive:
            raise JobRunningError(
                f"Job {self._job.name!r} in {self._job.uri} is being run by query "
                f"{query.name or query.id} of this driver.",
                todo="Stop that query first, or give this one another job= name.",
            )
        _Services.get(self._spark, self._settings).remove(session)

    def _check_operators(self, manifests: list[Manifest]) -> dict[str, OperatorSpec]:
        newest = {m.operator: m for m in manifests if m.kind == "checkpoint"}
        gone = sorted(set(newest) - set(self._operators))
        if gone and not self._allow_dropped_state:
            raise MissingUidError(
                f"The checkpoint of job {self._job.name!r} holds state of operator(s) "
                f"{', '.join(map(repr, gone))}, which the query does not have.",
                todo="Give the operator the uid it had, or pass allow_dropped_state=True to drop "
                "its state.",
            )
        specs = {}
        for uid, operator in self._operators.items():
            known = newest.get(uid)
            specs[uid] = OperatorSpec(
                uid=uid,
                parallelism=operator.parallelism,
                max_parallelism=operator.max_parallelism,
                states=self._state_ids(operator, known),
                schemas=operator.schemas(),
            )
        return specs

    def _state_ids(self, operator: Operator, known: Manifest | None) -> dict[str, int]:
        ids = dict(known.states) if known else {}
        if known is not None:
            declared = operator.schemas()
            for name, schema in known.schemas.items():
                if name in declared and declared[name] == schema:
                    continue
                if name not in declared and self._allow_dropped_state:
                    continue
                what = "the key" if name == _KEY_STATE else f"state {name!r}"
                raise StateMismatchError(
                    f"Operator {operator.uid!r} was started with {what} as "
                    f"{declared.get(name, 'nothing')}, but the checkpoint has it as {schema}.",
                    todo="Declare it as it was (a new state may be added under a new name), or "
                    "pass allow_dropped_state=True where a state is gone for good.",
                )
        for name in operator.states:
            # An id is never given again, even if its state was dropped: its keys may still exist.
            ids.setdefault(name, max(ids.values(), default=0) + 1)
        return ids

    def _check_location(
        self, location: CheckpointLocation, manifests: list[Manifest], *, rewind: bool
    ) -> int:
        """The batch that Spark runs next, after a due rewind."""
        progress = self._job.progress(manifests)
        kept = {u: e for u, e in progress.last_epochs.items() if u in self._operators}
        progress = type(progress)(progress.job, progress.uri, progress.query_id, kept)
        decision = decide_start(location.progress(), progress)
        if decision.verdict is Verdict.REWIND:
            if not rewind:
                raise RewindError(
                    f"Batch {decision.batch} of {location.path} must be repeated before the query "
                    f"can go on.",
                    todo="Start it once with backend.start(writer), which goes back by that batch.",
                )
            location.rewind(decision.batch)
        return decision.batch

    # --- the start -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """While open, a query that is started finds this session and passes Spark's check."""
        context = self._spark.sparkContext
        self._name = f"{self._job_id}/{system.new_id()}"
        server = _Services.get(self._spark, self._settings)
        endpoint = server.add(self._name, secrets.token_urlsafe(24), self.session)
        checked = self._spark.conf.get(_CHECK, "true")
        before = context.getLocalProperty(ENDPOINT_PROPERTY)
        context.setLocalProperty(ENDPOINT_PROPERTY, endpoint.to_property())
        self._spark.conf.set(_CHECK, "false")
        try:
            yield
        except BaseException:
            server.remove(self._name)
            raise
        finally:
            self._spark.conf.set(_CHECK, checked or "true")
            context.setLocalProperty(ENDPOINT_PROPERTY, before)  # type: ignore[arg-type]

    def bind_one(self, started: list[StreamingQuery]) -> None:
        """As :meth:`bind`, for the one query that a block started."""
        if len(started) != 1:
            error = UnsupportedQueryError(
                f"{len(started)} queries were started inside starting(); there must be one.",
                todo="Start one query per job; if it failed at once, its own error says why.",
            )
            self.session.refuse(error)
            for query in started:
                query.stop()
            raise error
        self.bind(started[0])

    def bind(self, query: StreamingQuery) -> None:
        """Check the query that was started, take over the job, and let its tasks in."""
        try:
            self._bind(query)
        except BaseException as error:
            refusal = (
                error
                if isinstance(error, StateBackendError)
                else UnsupportedQueryError(
                    f"The query could not be bound to job {self._job.name!r} ({error})."
                )
            )
            self.session.refuse(refusal)
            query.stop()
            raise

    def _bind(self, query: StreamingQuery) -> None:
        stream: Any = query._jsq.streamingQuery()
        kind = stream.getClass().getSimpleName()
        if kind != "MicroBatchExecution":
            raise UnsupportedQueryError(
                f"The query runs as {kind}, not in micro-batches.",
                todo="Use a processing-time, once or availableNow trigger, and no asynchronous "
                "progress tracking.",
            )
        manifests = self._log.manifests()
        location = CheckpointLocation(self._spark, stream.resolvedCheckpointRoot())
        batch = self._check_location(location, manifests, rewind=False)
        # Known from before the start if possible: a batch that no operator took part in may have
        # been committed since.
        first_epoch = batch if self._first_epoch is None else self._first_epoch
        known = resolve(manifests)
        firsts = {
            uid: known[uid].first_epoch if uid in known else first_epoch for uid in self._operators
        }
        tenure = self._log.claim(
            query_id=str(query.id), run=self._name, settings=operators_setting(firsts)
        )
        # Read again: what another driver had committed before the claim is part of the truth.
        manifests = self._log.manifests()
        parallelism = max(o.parallelism for o in self._operators.values())
        coordinator = Coordinator(
            job=self._job.name,
            job_id=tenure.job_id,
            run=self._name,
            query_id=str(query.id),
            operators=self._specs,
            lineages={
                uid: lineage
                for uid, lineage in resolve(manifests).items()
                if uid in self._operators
            },
            inline_budget_bytes=self._settings.inline_budget_bytes(parallelism),
            base_every_epochs=self._settings.base_every_epochs,
            first_epoch=first_epoch,
        )
        _Services.running[self._job.store.uri] = (self._name, query)
        self.session.open(coordinator, tenure)
        _log.info(
            "job %s: generation %d runs query %s", self._job.name, tenure.generation, query.id
        )


def _options(writer: DataStreamWriter | None) -> dict[str, str]:
    """A writer's options, keys in lower case; PySpark keeps them in the JVM only."""
    if writer is None:
        return {}
    jwriter: Any = writer._jwrite
    field = jwriter.getClass().getDeclaredField("extraOptions")
    field.setAccessible(True)
    found: dict[str, str] = {}
    pairs = field.get(jwriter).iterator()
    while pairs.hasNext():
        pair = pairs.next()
        found[str(pair._1()).lower()] = str(pair._2())
    return found
