"""One vocabulary of faults: whoever strikes names what it strikes with, and no name is idle."""

from __future__ import annotations

from recovery.drill.catalogue import ALL as DRILLS
from tests.channels import plan as channels
from tests.continuous.runtime import trial
from tests.continuous.state import content
from tests.kills import strikes as kills
from tests.sim import config as sim
from tests.sim.continuous import config as jobs
from tests.support.faults import DRILLED, Fault, struck


def test_every_rate_of_the_simulations_is_of_a_fault() -> None:
    drawn = {name for name, _, _ in (*sim._RATES, *sim._TIMES, *sim._LATER, *sim._UNKIND)}
    assert set(sim.STRIKES) == drawn | {"rescale", "flipped_base", "listing_lag_s"}
    assert all(hasattr(channels.Config(), name) for name in channels.STRIKES)
    drawn = {name for name, _, _ in (*jobs._RATES, *jobs._TIMES)}
    assert set(jobs.STRIKES) == drawn | {"rescale"}


def test_every_fault_of_a_drill_and_of_the_kills_is_named() -> None:
    assert DRILLED.keys() == DRILLS.keys()
    assert {fault.name for fault in kills.ALL} < {fault.value for fault in Fault}


def test_no_name_is_idle_and_each_says_what_happens() -> None:
    by = (
        *sim.STRIKES.values(),
        *sim.IN_SOME_PLANTED_WORLDS.values(),
        *channels.STRIKES.values(),
        *jobs.STRIKES.values(),
        *DRILLED.values(),
    )
    named = {fault for faults in by for fault in faults}
    named |= {fault for fault in Fault if fault in {one.name for one in kills.ALL}}
    assert named | {*sim.ALWAYS, *channels.ALWAYS, *trial.STRIKES, *content.STRIKES} == set(Fault)
    assert all(fault.sentence.endswith(".") for fault in Fault)
    assert len({fault.sentence for fault in Fault}) == len(Fault)


def test_only_faults_are_counted_as_such() -> None:
    assert struck({"worker killed": 2, "worker killed: task": 9, "query failed SB5001": 1}) == {
        Fault.WORKER_KILLED: 2
    }
