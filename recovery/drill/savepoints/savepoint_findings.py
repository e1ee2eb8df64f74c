"""What is wrong with a drill's savepoint, found without Spark, in a process of its own.

It has the environment of the drill's drivers, so that it reaches the store that they reach.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from recovery.savepoints.savepoint import below, read_savepoint, savepoints_folder
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.savepoint_list import list_savepoints
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import S3_SCHEMES, open_store
from statebackend import system
from statebackend.errors import DrillError, NotRestorableError, StateBackendError

__all__ = ["What", "found_apart", "main", "removed", "verified"]

Open = Callable[[str], ObjectStore]
What = Literal["verify", "remove"]

_LOOK_WITHIN_S: Final = 240.0


def found_apart(
    what: What,
    uri: str,
    jobs_uri: str,
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    folder: Path,
) -> list[str]:
    """What is wrong with a savepoint, a sentence for each, as a process of its own finds it.

    Args:
        settings: the backend's, which say how the store is reached. folder: the drill's.

    Raises:
        DrillError: that could not be found out.
    """
    reached = [str(settings.get(name, "")) for name in ("s3_endpoint", "s3_region")]
    module = "recovery.drill.savepoints.savepoint_findings"
    ran = subprocess.run(
        [sys.executable, "-m", module, what, uri, jobs_uri, *reached],
        env=dict(environment),
        cwd=folder,
        capture_output=True,
        timeout=_LOOK_WITHIN_S,
    )
    if ran.returncode:
        raise DrillError(
            f"The savepoint {uri} could not be looked at: "
            f"{ran.stderr.decode(errors='replace')[-2000:]}",
            todo=f"Look at the drill's folder {folder}.",
        )
    return msgspec.json.decode(ran.stdout, type=list[str])


# --- in that process ------------------------------------------------------------------------------


def verified(uri: str, jobs_uri: str, open_at: Open) -> list[str]:
    """What is wrong with a savepoint that was finished; empty if it is whole.

    Args:
        jobs_uri: below which it is to be listed. open_at: the store at a URI.
    """
    store = open_at(uri)
    try:
        report = verify_savepoint(store)
    except StateBackendError as error:
        return [str(error)]
    wrong = [f"{one.object or uri}: {one.problem} [{one.code}]" for one in report.findings]
    if True not in _listed(uri, jobs_uri, open_at):
        wrong.append("it is not listed as complete")
    return wrong


def removed(uri: str, jobs_uri: str, open_at: Open) -> list[str]:
    """Delete what is left of a savepoint that was cut; what is wrong with it before or after."""
    store = open_at(uri)
    wrong = []
    if _listed(uri, jobs_uri, open_at) != [False]:
        wrong.append("it is not listed as one that was never finished")
    with suppress(NotRestorableError):
        wrong.append(f"it reads as a savepoint of epoch {read_savepoint(store).epoch}")
    wrong += [f"{name} is none of its own" for name in delete_savepoint(store)]
    wrong += [f"{info.name} is there after it was deleted" for info in store.list("")]
    if _listed(uri, jobs_uri, open_at):
        wrong.append("it is listed after it was deleted")
    return wrong


def _listed(uri: str, jobs_uri: str, open_at: Open) -> list[bool]:
    """Whether it is complete, as often as it is listed."""
    folder = savepoints_folder(jobs_uri)
    found = list_savepoints(open_at(folder), lambda name: open_at(below(folder, name)))
    return [one.complete for one in found if one.uri == open_at(uri).uri]


def main() -> None:
    """Look as the arguments say: what, the savepoint's URI, the jobs', S3's endpoint and region."""
    what, uri, jobs_uri, endpoint, region = sys.argv[1:]

    def open_at(place: str) -> ObjectStore:
        on_s3 = place.partition(":")[0] in S3_SCHEMES
        options = StoreOptions(endpoint_url=endpoint, region=region) if on_s3 else None
        return open_store(place, new_id=system.new_id, options=options)

    look = {"verify": verified, "remove": removed}[what]
    sys.stdout.buffer.write(msgspec.json.encode(look(uri, jobs_uri, open_at)))


if __name__ == "__main__":
    main()
