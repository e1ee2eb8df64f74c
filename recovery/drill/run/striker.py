"""Faults at their time: each one strikes when its epoch is there, and is waited out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.needs import Given, missing
from recovery.drill.faults.stage import CannotStrikeError
from recovery.drill.report.drill_report import Struck
from recovery.drill.run.live_stage import LiveStage
from recovery.drill.run.strike_schedule import Strike, soak, target_rng

__all__ = ["NOTHING_LEFT", "START_S", "Striker"]

NOTHING_LEFT: Final = "no epoch came after it"  # it struck a job that had nothing left to do
START_S: Final = 600.0  # on a busy machine, from nothing to the first epoch
_EPOCH_S: Final = 600.0
_LASTED_S: Final = 1.0  # shorter strikes are moments


class Striker:
    """Makes the faults of a drill happen, one after the other, and writes them down.

    Args:
        seed: what targets are drawn from.
        given: how the drill is set up: a fault that needs more is skipped.
    """

    def __init__(self, stage: LiveStage, *, seed: int, given: Given) -> None:
        self.struck: list[Struck] = []
        self._stage, self._seed, self._given = stage, seed, given
        self._number = 0

    def soak(self, pool: Sequence[DrillFault], duration_s: float, *, named: bool) -> None:
        """Draw and strike until the time is over.

        Args:
            pool: what is drawn from.
            named: somebody asked for these, and is told of what is skipped.

        Raises:
            DrillError: the job does not recover.
        """
        stage = self._stage
        possible = []
        for fault in pool:
            reason = missing(fault, self._given)
            if not reason:
                possible.append(fault)
            elif named:
                self.skip(fault, reason)
        until_s = stage.now_s() + duration_s
        for fault, gap in soak(possible, seed=self._seed):
            if stage.now_s() >= until_s:
                return
            self.strike(Strike(fault=fault, after_epoch=stage.committed() + gap))
        stage.pause(max(0.0, until_s - stage.now_s()))

    def skip(self, fault: DrillFault, reason: str) -> None:
        """Write down that a fault was not made."""
        self._stage.say(f"{fault.name} skipped: {reason}")
        self.struck.append(
            Struck(
                fault=fault.name,
                at_s=self._stage.now_s(),
                at_epoch=self._stage.committed(),
                skipped=reason,
            )
        )

    def strike(self, strike: Strike) -> None:
        """Wait for the epoch, make the fault, and wait for the next epoch.

        Raises:
            DrillError: the job does not get that far, or does not recover.
        """
        stage, fault = self._stage, strike.fault
        reason = missing(fault, self._given)
        if reason:
            self.skip(fault, reason)
            return

        def reached() -> bool:
            return stage.committed() >= strike.after_epoch or stage.has_read_all()

        stage.until(reached, f"epoch {strike.after_epoch}", _EPOCH_S)
        if stage.committed() < strike.after_epoch:
            self.skip(fault, f"the input ended before epoch {strike.after_epoch}")
            return
        stage.until(stage.drivers.is_ready, "a driver", START_S)
        self._make(fault)

    def _make(self, fault: DrillFault) -> None:
        stage = self._stage
        rng = target_rng(self._seed, self._number, fault.name)
        self._number += 1
        at_epoch = stage.committed()
        # What was committed before the strike must not be taken for the recovery from it.
        stage.until(
            lambda: at_epoch < 0 or any(done.epoch == at_epoch for done in stage.feeder.epochs),
            f"epoch {at_epoch} to be seen",
            _EPOCH_S,
        )
        at_s, before = stage.now_s(), len(stage.feeder.epochs)
        stage.say(f"{fault.name} strikes")
        stage.drivers.struck.append(fault.name)
        target, skipped, ended_s = "", "", None
        try:
            target = fault.strike(stage, rng)
            stage.drivers.over()
            ended_s = stage.now_s()
            stage.say(f"{fault.name}: {target}")
            known = len(stage.feeder.epochs)
            stage.until(
                lambda: len(stage.feeder.epochs) > known or stage.has_read_all(),
                f"an epoch after {fault.name}",
                _EPOCH_S,
            )
            if len(stage.feeder.epochs) == before:
                skipped = NOTHING_LEFT
                stage.say(f"{fault.name} does not count: {skipped}")
        except CannotStrikeError as error:
            stage.drivers.over()
            stage.drivers.struck.remove(fault.name)
            skipped = str(error)
            stage.say(f"{fault.name} skipped: {skipped}")
        finally:
            after = [] if skipped else [done.at_s for done in stage.feeder.epochs[before:]]
            lasted = ended_s is not None and ended_s - at_s > _LASTED_S
            self.struck.append(
                Struck(
                    fault=fault.name,
                    at_s=at_s,
                    at_epoch=at_epoch,
                    target=target,
                    until_s=ended_s if lasted else None,
                    skipped=skipped,
                    recovered_s=after[0] - at_s if after else None,
                )
            )
