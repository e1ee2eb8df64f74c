"""What the driver keeps in the checkpoints for sources and sinks: lists, which belong to no key.

A source's subtasks say at each barrier what they read; the driver puts that, and what nobody had
(the assigner's cut), into the record of the source. So after a restore all splits come from one
hand, at any parallelism. A sink's record holds what was prepared and may not be committed. Each is
an operator of the log with one subtask, in the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from snapshot.barriers.channel_watermarks import START_MS
from snapshot.barriers.pending_checkpoints import Subtask
from snapshot.protocol.messages import AckRequest
from snapshot.storage.object_store import ObjectStore
from statebackend.continuous.job.graph import Graph, reads_together
from statebackend.continuous.job.slot_messages import Acked
from statebackend.continuous.sources.split_assigner import SplitAssigner
from statebackend.continuous.sources.split_assignment import decode_assignment, encode_assignment
from statebackend.continuous.worker.checkpointed_state import Background
from statebackend.continuous.worker.list_state import PlainState
from statebackend.continuous.worker.overtaken_rows import Place, decode, watermark
from statebackend.operators.declared_states import StateDeclaration
from statebackend.runtime.worker.participant import JobSubtask, Membership, Participant
from statebackend.schema.ddl import parse_ddl
from statebackend.system import SYSTEM, System

__all__ = ["DriverLists", "sink_states", "source_states"]

SPLITS: Final = "splits"
ASSIGNER: Final = "assigner"
IN_FLIGHT: Final = "in_flight"
PREPARED: Final = "prepared"


def source_states() -> dict[str, StateDeclaration]:
    """What a source has in the checkpoints."""
    return {
        SPLITS: _declared(SPLITS, "id STRING, state STRING"),
        ASSIGNER: _declared(ASSIGNER, "state BINARY"),
        IN_FLIGHT: _declared(IN_FLIGHT, "element BINARY"),
    }


def sink_states() -> dict[str, StateDeclaration]:
    """What a sink has in the checkpoints."""
    return {PREPARED: _declared(PREPARED, "committable BINARY")}


def _declared(name: str, schema: str) -> StateDeclaration:
    value = parse_ddl(schema).json()  # without the JVM, which a restart may find gone
    return StateDeclaration(name=name, kind="split", value_schema=value)


class DriverLists:
    """The lists of all sources and sinks in one run.

    Args:
        job, local_name: of the job. member: of the run. store: the job's folder.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        job: str,
        local_name: str,
        member: Membership,
        store: ObjectStore,
        background: Background,
        system: System = SYSTEM,
    ) -> None:
        def state(uid: str, declared: Mapping[str, StateDeclaration]) -> PlainState:
            who = JobSubtask(job, local_name, uid, subtask=0, parallelism=1)
            participant = Participant(who, member, store, system)
            return PlainState(participant, background, declared=declared)

        self._graph = graph
        self._sources = {uid: state(uid, source_states()) for uid in graph.sources}
        self._sinks = {uid: state(uid, sink_states()) for uid in graph.sinks}

    @property
    def _all(self) -> list[PlainState]:
        return [*self._sources.values(), *self._sinks.values()]

    def open(self, epoch: int, stamp_ms: int) -> None:
        """Begin the run's first epoch, with the lists as they were after the one before.

        Raises:
            StateBackendError: the coordinator refused, or they cannot be restored.
        """
        for one in self._all:
            one.open(epoch, stamp_ms)

    def assigners(self) -> dict[str, SplitAssigner]:
        """Of every source, restored.

        Raises:
            CorruptionError, UnsupportedFormatError, ProtocolError: see `SplitAssigner.restore`.
        """
        found = {}
        for uid, state in self._sources.items():
            source = self._graph.sources[uid].source
            readers = 1 if uid in self._graph.single else self._graph.parallelism
            assigner = SplitAssigner(readers, splits_end=not reads_together(source))
            reading = [decode_assignment(*row) for row in state.lists[SPLITS].get()]
            cuts = [bytes(row[0]) for row in state.lists[ASSIGNER].get()]
            assigner.restore(cuts[0] if cuts else None, reading)
            found[uid] = assigner
        return found

    def in_flight(self) -> dict[int, dict[str, list[bytes]]]:
        """What lay in the outputs of sources in the restored checkpoint, by slot and source.

        And where a source's watermark stood: the smallest of its subtasks, as what one of them
        read another one may read now.

        Raises:
            CorruptionError, UnsupportedFormatError: it does not read.
            RescaleError: there is some, and the parallelism was another.
        """
        found: dict[int, dict[str, list[bytes]]] = {}
        parallelism = self._graph.parallelism
        for uid, state in self._sources.items():
            stood_ms: list[int] = []
            for (element,) in state.lists[IN_FLIGHT].get():
                for one in decode(uid, [bytes(element)], parallelism):
                    if one.direction == "at":
                        stood_ms.append(one.at_ms)
                    else:
                        of_slot = found.setdefault(one.subtask, {})
                        of_slot.setdefault(uid, []).append(bytes(element))
            at_ms = min(stood_ms, default=START_MS)
            for subtask in range(parallelism) if at_ms != START_MS else ():
                said = watermark(Place(uid, subtask, parallelism), at_ms)
                found.setdefault(subtask, {}).setdefault(uid, []).append(said)
        return found

    def committables(self) -> dict[str, list[bytes]]:
        """What every sink had prepared in the restored checkpoint."""
        return {
            uid: [bytes(row[0]) for row in state.lists[PREPARED].get()]
            for uid, state in self._sinks.items()
        }

    def acks(
        self, checkpoint: int, parts: Mapping[Subtask, Acked], cuts: Mapping[str, bytes]
    ) -> list[AckRequest]:
        """The parts of sources and sinks in a checkpoint that every subtask has acked.

        Raises:
            StateBackendError: they cannot be made durable.
        """
        acks = []
        for uid, state in self._sources.items():
            own = [parts[one] for one in sorted(parts) if one.vertex == uid]
            reading = [position for part in own for position in part.positions]
            state.lists[SPLITS].update([encode_assignment(one) for one in reading])
            state.lists[ASSIGNER].update([(cuts[uid],)])
            state.lists[IN_FLIGHT].update([(one,) for part in own for one in part.in_flight])
            acks.append(_persisted(state, checkpoint))
        prepared = prepared_by(parts)
        for uid, state in self._sinks.items():
            state.lists[PREPARED].update([(one,) for one in prepared.get(uid, [])])
            acks.append(_persisted(state, checkpoint))
        return acks

    def confirmed(self, checkpoint: int, next_stamp_ms: int) -> None:
        """The checkpoint is complete."""
        for one in self._all:
            one.confirmed(checkpoint, next_stamp_ms)

    def close(self) -> None:
        """The run is over."""
        for one in self._all:
            one.close()


def prepared_by(parts: Mapping[Subtask, Acked]) -> dict[str, list[bytes]]:
    """What a checkpoint has for every sink, over its subtasks."""
    found: dict[str, list[bytes]] = {}
    for one in sorted(parts):
        for uid, prepared in parts[one].prepared.items():
            found.setdefault(uid, []).extend(prepared)
    return found


def _persisted(state: PlainState, checkpoint: int) -> AckRequest:
    ack = state.persist(state.freeze(checkpoint))
    assert ack is not None  # nobody gives it up
    return ack
