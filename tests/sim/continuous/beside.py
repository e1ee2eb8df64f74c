"""A job of micro-batches on the hosts and in the bucket of a continuous one, cleaning up there too.

It is the other simulation's whole job, with its checkers and with faults of its own.
"""

from __future__ import annotations

from random import Random

from tests.sim.config import Config
from tests.sim.continuous.config import JobConfig
from tests.sim.ground import Ground
from tests.sim.savepoints import CLONES
from tests.sim.world import World as Batches

__all__ = ["FOLDER", "begin"]

_JOB = "batches"
FOLDER = f"{CLONES}{_JOB}/"


def begin(seed: int, config: JobConfig, ground: Ground) -> None:
    """Start it; its operator has the name of one of the continuous job."""
    random = Random(f"batches {seed}")
    made = Config(
        parallelism=random.choice([1, 2, 3]),
        hosts=config.hosts,
        workers=2,
        keys=5,
        arrow=True,
        small_bytes=config.small_bytes,
        asynchronous=random.random() < 0.5,
        retain_epochs=random.choice([1, 2]),
        clean_every_epochs=1,
        inline_budget_bytes=random.choice([0, 100]),
        base_every_epochs=3,
        unflushed_epochs=random.choice([1, 4]),
        store_faults=config.store_faults,
        worker_killed_every_s=random.choice([0.0, 3.0]),
        driver_killed_every_s=random.choice([0.0, 6.0]),
        outside_clean_every_s=random.choice([0.0, 4.0]),
        rescale=random.choice([0.0, 0.5]),
    )
    Batches(seed, made, ground, job=_JOB, folder=FOLDER).begin()
