"""Savepoints of a drill's job: asked for through files, and looked at by a process of their own.

A file in the drill's folder asks the running driver for one, and says where to; the driver answers
with another file, and removes the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from recovery.drill.driver.driver_messages import (
    JOB,
    SAVEPOINT,
    SAVEPOINT_ANSWER,
    DriverConfig,
    Taken,
)
from recovery.drill.savepoints.savepoint_findings import What, found_apart
from recovery.savepoints.savepoint import default_folder

__all__ = ["Savepoints"]


class Savepoints:
    """Those of one drill.

    Args:
        config: of every driver. environment: of processes which reach the store.

    Attributes:
        taken: those that the drill's end is to look at, in their order.
    """

    def __init__(self, config: DriverConfig, environment: Callable[[], Mapping[str, str]]) -> None:
        self.taken: list[Taken] = []
        self._root, self._config, self._environment = Path(config.root), config, environment
        self._places = 0

    def place(self) -> str:
        """The URI of a folder for one, which is empty: where the job's others are listed."""
        self._places += 1
        return default_folder(self._config.uri, JOB, f"drill-{self._places}")

    def ask(self, to: str = "") -> None:
        """Have the running driver take one; empty: where it goes if nobody says where to."""
        (self._root / SAVEPOINT_ANSWER).unlink(missing_ok=True)
        asked = self._root / SAVEPOINT
        draft = asked.with_suffix(".draft")
        draft.write_text(to)
        draft.rename(asked)  # whole at once

    def withdraw(self) -> None:
        """Ask no more: the next driver is not to take it."""
        (self._root / SAVEPOINT).unlink(missing_ok=True)

    def answer(self) -> Taken | None:
        """What the driver says to the last that it was asked; None: nothing yet."""
        try:
            data = (self._root / SAVEPOINT_ANSWER).read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=Taken)

    def look(self, what: What, uri: str) -> list[str]:
        """What is wrong with a savepoint, a sentence for each.

        Raises:
            DrillError: that could not be found out.
        """
        config = self._config
        return found_apart(
            what, uri, config.uri, config.settings, self._environment(), folder=self._root
        )
