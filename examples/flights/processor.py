"""What is kept per aircraft: a processor as one writes it for Spark, which knows nothing of us.

It is `pyspark.sql.streaming.StatefulProcessor` and would run in Spark's own `transformWithState`.
The data holds departures from New York only, and no taxi times. So:

* an arrival is the landing: departure plus the minutes in the air;
* a turnaround is the time on the ground, away and in New York together, between two departures:
  what is left after the flight out and the flight back, taken to be as long as the flight out.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

INPUT = (
    "tailnum string, flight int, dest string, scheduled timestamp_ntz, "
    "dep_delay int, arr_delay int, air_time int"
)
OUTPUT = (
    "tailnum string, legs bigint, flown bigint, cancelled bigint, diverted bigint, "
    "last_arrival timestamp_ntz, late_min bigint, recovered_min bigint, "
    "tight_turns bigint, last_tight_min array<int>, favourite string"
)
TIGHT_MIN = 120  # a turnaround under two hours is tight
KEPT_TURNS = 3

_MINUTE = datetime.timedelta(minutes=1)


@dataclass
class Log:
    """One aircraft so far, in the order of the state's schema."""

    legs: int = 0  # in the timetable: flown and cancelled
    flown: int = 0
    cancelled: int = 0
    diverted: int = 0  # flown, but not to where it should
    last_arrival: datetime.datetime | None = None  # None: none yet, or diverted since
    last_air_min: int = 0
    late_min: int = 0  # left late by, all legs together
    recovered_min: int = 0  # of that, made good by the arrival
    tight_turns: int = 0


LOG = (
    "legs bigint, flown bigint, cancelled bigint, diverted bigint, last_arrival timestamp_ntz, "
    "last_air_min int, late_min bigint, recovered_min bigint, tight_turns bigint"
)


class AircraftLog(StatefulProcessor):
    """One row per aircraft and epoch: how it stands now."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._log = handle.getValueState("log", LOG)
        self._tight = handle.getListState("last_tight", "minutes int")
        self._destinations = handle.getMapState("destinations", "dest string", "legs bigint")

    def handleInputRows(
        self, key: Any, rows: Iterator[Row], timerValues: TimerValues
    ) -> Iterator[Row]:
        log = Log(*(self._log.get() or ()))
        # The files are in order, but within one batch Spark promises none: rows of a key come as
        # the shuffle brought them. Turnarounds need the order of the timetable.
        for row in sorted(rows, key=lambda row: (row.scheduled, row.flight)):
            log.legs += 1
            if row.dep_delay is None:
                log.cancelled += 1
            else:
                self._fly(log, row)
        self._log.update(astuple(log))
        yield Row(
            tailnum=key[0],
            legs=log.legs,
            flown=log.flown,
            cancelled=log.cancelled,
            diverted=log.diverted,
            last_arrival=log.last_arrival,
            late_min=log.late_min,
            recovered_min=log.recovered_min,
            tight_turns=log.tight_turns,
            last_tight_min=[minutes for (minutes,) in self._tight.get()],
            favourite=self._favourite(),
        )

    def _fly(self, log: Log, row: Row) -> None:
        departed = row.scheduled + row.dep_delay * _MINUTE
        if log.last_arrival is not None:
            away_min = (departed - log.last_arrival) // _MINUTE
            self._turn_around(log, away_min - log.last_air_min)
        log.flown += 1
        log.late_min += max(0, row.dep_delay)
        (legs,) = self._destinations.getValue((row.dest,)) or (0,)
        self._destinations.updateValue((row.dest,), (legs + 1,))
        if row.air_time is None or row.arr_delay is None:
            log.diverted += 1
            log.last_arrival = None
            return
        log.last_arrival = departed + row.air_time * _MINUTE
        log.last_air_min = row.air_time
        log.recovered_min += max(0, max(0, row.dep_delay) - max(0, row.arr_delay))

    def _turn_around(self, log: Log, ground_min: int) -> None:
        # Below zero the aircraft cannot have been back: some tail numbers in the data are wrong.
        if 0 <= ground_min < TIGHT_MIN:
            log.tight_turns += 1
            kept = [*self._tight.get(), (ground_min,)]
            self._tight.put(kept[-KEPT_TURNS:])

    def _favourite(self) -> str | None:
        """Where it flew most often; by name among equals."""
        ranked = ((-legs, dest) for (dest,), (legs,) in self._destinations.iterator())
        return min(ranked, default=(0, None))[1]

    def close(self) -> None:
        pass
