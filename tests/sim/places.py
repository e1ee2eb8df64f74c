"""Where savepoints and the jobs that begin with one lie: folders of the bucket, and locations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from recovery.decide.start_batch import LocationProgress
from statebackend.errors import ObjectNotFoundError
from tests.sim.bucket import Bucket, SimStore
from tests.sim.freezes import at_call
from tests.sim.kernel import Process, Scheduler
from tests.sim.location import Plan, SimLocation

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = ["Folder", "FolderStore", "InstantStore", "NewLocation", "SavedLocation", "plan_file"]

_IO_S = 0.003
_SOURCE = b"v1\nfrom here on"


class Folder:
    """A part of the bucket, to `SimStore` as the whole."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket, self._prefix, self.sched = bucket, prefix, bucket.sched

    @property
    def down_until_s(self) -> float:
        return self._bucket.down_until_s

    def put(self, name: str, data: bytes) -> None:
        self._bucket.put(self._prefix + name, data)

    def create(self, name: str, data: bytes) -> Any:
        return self._bucket.create(self._prefix + name, data)

    def get(self, name: str) -> bytes:
        return self._bucket.get(self._prefix + name)

    def list(self, prefix: str) -> Any:
        found = self._bucket.list(self._prefix + prefix)
        cut = len(self._prefix)
        return [type(one)(one.name[cut:], one.size_bytes, one.modified_ms) for one in found]

    def delete(self, names: list[str]) -> None:
        self._bucket.delete([self._prefix + name for name in names])


class FolderStore(SimStore):
    """A folder of the bucket, as one process sees it."""

    def __init__(self, world: World, process: Process, prefix: str) -> None:
        super().__init__(Folder(world.bucket, prefix), process, world.config)  # type: ignore[arg-type]
        self.prefix = prefix

    @property
    def uri(self) -> str:
        return f"sim://{self.prefix.rstrip('/')}"


class InstantStore(FolderStore):
    """The same without a network, for checkers."""

    def _request(self, verb: str, name: str, do: Callable[[], Any]) -> Any:
        return do()

    def _read(self, name: str, data: bytes) -> bytes:
        return data

    def delete(self, names: Any) -> None:
        self._bucket.delete(list(names))


class SavedLocation(SimLocation):
    """The location's files, made from what `Shared` knows, as a savepoint reads them."""

    def list(self, folder: str) -> list[str]:
        """As `LocationFiles` has it."""
        return self.files(folder)

    def files(self, folder: str) -> list[str]:
        at_call()
        self._sched.pause(_IO_S)
        if folder == "sources":
            return ["sources/0/0"]
        known: Any = {"offsets": self._shared.offsets, "commits": self._shared.commits}
        return [f"{folder}/{batch}" for batch in sorted(known.get(folder, ()))]

    def chunks(self, name: str) -> Iterator[bytes]:
        at_call()
        self._sched.pause(_IO_S)
        folder, _, batch = name.partition("/")
        if folder == "metadata" and self._shared.query_id is not None:
            yield json.dumps({"id": self._shared.query_id}).encode()
        elif folder == "sources":
            yield _SOURCE
        elif folder == "offsets" and int(batch) in self._shared.offsets:
            yield plan_file(self._shared.offsets[int(batch)])
        elif folder == "commits" and int(batch) in self._shared.commits:
            yield b"v1\n{}"
        else:
            raise ObjectNotFoundError(f"There is no {name}.")


def plan_file(plan: Plan) -> bytes:
    """``offsets/n``."""
    return f"v1\n{json.dumps({'stamp': plan.stamp_ms})}\n{json.dumps({'seed': plan.seed})}".encode()


class NewLocation:
    """The checkpoint location of a query that is to begin with a savepoint."""

    path = "/new"

    def __init__(self, sched: Scheduler) -> None:
        self._sched = sched
        self.written: dict[str, bytes] = {}

    def progress(self) -> LocationProgress:
        at_call()
        self._sched.pause(_IO_S)
        said = self.written.get("metadata")
        return LocationProgress(
            path=self.path,
            query_id=None if said is None else str(json.loads(said)["id"]),
            last_offset=self._last("offsets/"),
            last_commit=self._last("commits/"),
        )

    def _last(self, folder: str) -> int:
        names = [name for name in self.written if name.startswith(folder)]
        return max((int(name.removeprefix(folder)) for name in names), default=-1)

    def files(self, folder: str) -> list[str]:
        at_call()
        self._sched.pause(_IO_S)
        return sorted(name for name in self.written if name.startswith(f"{folder}/"))

    def chunks(self, name: str) -> Iterator[bytes]:
        at_call()
        self._sched.pause(_IO_S)
        yield self.written[name]

    def write(self, name: str, pieces: Iterator[bytes]) -> None:
        data = b"".join(pieces)
        at_call()
        self._sched.pause(_IO_S)
        self.written[name] = data
