"""Twenty promises of the README, and for each a change of the product that breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["BROKEN", "BrokenPromise"]


@dataclass(frozen=True)
class BrokenPromise:
    """A promise, and how it is broken.

    Attributes:
        name: of the promise, as it is told to users.
        path: of the module that is changed, from the top folder.
        before, after: what stands there once, and what takes its place.
        tests: files or folders of tests of which one must fail.
    """

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


_EXACT: Final = "tests/spark/local/test_exact_results.py"
_COMMITS: Final = "tests/spark/local/test_commit_and_takeover.py"

BROKEN: Final = (
    BrokenPromise(
        "what Spark has committed is durable",
        "statebackend/runtime/driver/session.py",
        "                    self._commit(coordinator, tenure, work)\n        self._publish_due",
        "                    self._writer.submit(\n"
        "                        lambda: self._commit(coordinator, tenure, work)\n"
        "                    )\n        self._publish_due",
        ("tests/recovery/test_session.py", _COMMITS),
    ),
    BrokenPromise(
        "a restart on the same hosts reads nothing from the store",
        "recovery/decide/restore_plan.py",
        "    if copy.epoch is None:\n",
        "    if copy.epoch is None or not copy.applying:\n",
        ("tests/recovery/test_plan.py", _EXACT),
    ),
    BrokenPromise(
        "a lost host is made up for by the durable copy",
        "recovery/decide/restore_plan.py",
        "    return steps + since\n",
        "    return steps + since[:-1]\n",
        ("tests/recovery/test_plan.py", _EXACT),
    ),
    BrokenPromise(
        "input that was cut off leaves no trace",
        "statebackend/spark/worker/epoch_input.py",
        "    if not reader.barriers:\n",
        "    if not reader.barriers and not reader.subtasks:\n",
        ("tests/ops", "tests/spark/test_attempts.py", "tests/sim", _EXACT),
    ),
    BrokenPromise(
        "small state costs one object for each operator and epoch",
        "statebackend/runtime/worker/slice_parts.py",
        "    elif delta.size_bytes > budget_bytes:\n",
        "    elif delta.size_bytes > 0:\n",
        (_COMMITS, "tests/spark/store"),
    ),
    BrokenPromise(
        "a driver that was taken over commits nothing more",
        "snapshot/log/commit_log.py",
        "        if verdict is Verdict.COMMITTED:\n            return None\n",
        "        if verdict in (Verdict.COMMITTED, Verdict.FENCED):\n            return None\n",
        ("tests/snapshot/test_commit_log.py", _COMMITS),
    ),
    BrokenPromise(
        "another parallelism takes over each key once",
        "statebackend/rocks/clipping.py",
        "        if first > after:\n",
        "        if first > after + 1_000_000:\n",
        ("tests/rocks", "tests/recovery/test_rescale_store.py"),
    ),
    BrokenPromise(
        "a timer fires once",
        "statebackend/state/timers.py",
        "        self.remove(cursor.prefixes[index], cursor.suffixes[index], at_ms)\n",
        "        self.is_set(cursor.prefixes[index], cursor.suffixes[index], at_ms)\n",
        ("tests/state", "tests/api"),
    ),
    BrokenPromise(
        "what has expired is not seen",
        "statebackend/state/ttl_cells.py",
        '        """The current key\'s row, or None."""\n'
        "        index = self._index()\n"
        "        data = self._current[index]\n"
        "        if data is None or data[:TIME_BYTES] <= self._hidden:\n",
        '        """The current key\'s row, or None."""\n'
        "        index = self._index()\n"
        "        data = self._current[index]\n"
        "        if data is None:\n",
        ("tests/state", "tests/api"),
    ),
    BrokenPromise(
        "a null key is refused",
        "statebackend/schema/keys/key_codec.py",
        "            if count:\n                raise self.null_key_error(count)\n",
        "            if count > 1_000_000:\n                raise self.null_key_error(count)\n",
        ("tests/schema",),
    ),
    BrokenPromise(
        "keys that are equal in Spark are one key",
        "statebackend/schema/keys/key_scalars.py",
        "as_float(plain + 0.0)",
        "as_float(plain)",
        ("tests/schema", _EXACT),
    ),
    BrokenPromise(
        "a change of a schema that loses state is refused",
        "statebackend/schema/evolution.py",
        "    if found.problems:\n        raise Incompatible(found.problems)\n    return Evolution(",
        "    return Evolution(",
        ("tests/schema",),
    ),
    BrokenPromise(
        "an initial state comes in once",
        "snapshot/protocol/running_operator.py",
        "self.spec.initial.get(request.subtask) if self._is_first else None",
        "self.spec.initial.get(request.subtask)",
        ("tests/snapshot", "tests/recovery/test_protocol_model.py", "tests/sim"),
    ),
    BrokenPromise(
        "broadcast state is the same in all subtasks, or the batch fails",
        "snapshot/protocol/operator_state_slices.py",
        "    if len(sides) < 2:\n        return\n",
        "    if len(sides) < 2_000_000:\n        return\n",
        ("tests/snapshot", "tests/recovery"),
    ),
    BrokenPromise(
        "an error of a processor names the user's line",
        "statebackend/operators/errors/user_errors.py",
        '    return " at " + ", ".join(frames) if frames else ""\n',
        '    return ""\n',
        ("tests/ops", "tests/api"),
    ),
    BrokenPromise(
        "other sessions are left alone",
        "statebackend/drop_in.py",
        "    found = [backend for session, backend in _backends if _same(session, spark)]\n",
        "    found = [backend for session, backend in _backends if session]\n",
        ("tests/spark/local/test_install.py",),
    ),
    BrokenPromise(
        "a damaged object is named and never used",
        "recovery/restore/fetch.py",
        "        if length == size_bytes and found == digest:\n",
        "        if found:\n",
        ("tests/recovery",),
    ),
    BrokenPromise(
        "cleaning deletes nothing that a checkpoint needs",
        "snapshot/retention/deletable.py",
        "    if sequence >= view.oldest_needed:\n        return Fate.LIVE\n",
        "    if sequence > view.oldest_needed:\n        return Fate.LIVE\n",
        ("tests/snapshot",),
    ),
    BrokenPromise(
        "a savepoint never goes where something lies",
        "recovery/savepoints/savepoint_folder.py",
        "        if taken or store.create(",
        "        if store.create(",
        ("tests/recovery", "tests/cli/test_cli_savepoint.py"),
    ),
    BrokenPromise(
        "a sink of files commits each file once",
        "statebackend/continuous/sinks/file_sink.py",
        "        staged = [one for one in found if self._is_staged(one)]\n",
        "        staged = [one for one in found if one.staged]\n",
        ("tests/continuous/sinks",),
    ),
    BrokenPromise(
        "a written savepoint holds every row",
        "statebackend/tables/savepoint_of_rows.py",
        "    if some:\n        yield made(some)\n",
        "    if len(some) >= _PIECE:\n        yield made(some)\n",
        ("tests/tables",),
    ),
    BrokenPromise(
        "no key of TLS leaves its process",
        "statebackend/rpc/tls.py",
        '        return "Tls(...)"\n',
        '        return f"Tls({self.key!r})"\n',
        ("tests/spark/test_tls.py",),
    ),
)
