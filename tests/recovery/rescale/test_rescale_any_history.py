"""Changes of parallelism in any history: each subtask begins with the model's state of its keys.

Whatever is run, killed, lost, damaged and rescaled, nobody has a key twice.
"""

from __future__ import annotations

import random
import shutil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.recovery.driver import MAX_PARALLELISM, Changes
from tests.recovery.rescale.rescaled_job import HOSTS, World, key

EPOCHS = st.lists(
    st.dictionaries(
        st.builds(key, st.integers(0, MAX_PARALLELISM - 1), st.integers(0, 2)),
        st.one_of(st.none(), st.integers(0, 9).map(lambda n: b"%d" % n)),
        max_size=6,
    ),
    min_size=1,
    max_size=3,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), EPOCHS),
        st.tuples(st.just("start"), st.integers(1, MAX_PARALLELISM)),
        st.tuples(st.just("die"), st.integers(0, 3)),
        st.tuples(st.just("repeat"), st.integers(1, MAX_PARALLELISM)),
        st.tuples(st.just("lose"), st.sampled_from(HOSTS)),
        st.tuples(st.just("damage"), st.integers(0, 1 << 16)),
    ),
    max_size=7,
)


def damage(world: World, rng: random.Random) -> None:
    """A file of a local copy is cut short, gone, or has a wrong bit."""
    files = [p for p in world.root.rglob("*") if p.is_file() and p.name not in ("lease", "holder")]
    if not files:
        return
    path = rng.choice(sorted(files))
    data, kind = path.read_bytes(), rng.randrange(3)
    path.unlink()  # a hard link of it is another copy's
    if kind == 1:
        path.write_bytes(data[: len(data) // 2])
    elif kind == 2 and data:
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])


@pytest.mark.full  # long random histories; test_rescale_store has short ones
@pytest.mark.parametrize(
    "large",
    [pytest.param(False, id="small", marks=pytest.mark.full), pytest.param(True, id="files")],
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parallelism=st.integers(1, MAX_PARALLELISM), steps=STEPS, seed=st.integers(0, 1 << 30))
def test_whatever_happens_each_subtask_begins_with_the_models_state(
    tmp_path_factory: pytest.TempPathFactory,
    large: bool,
    parallelism: int,
    steps: list[tuple[str, Any]],
    seed: int,
) -> None:
    rng = random.Random(seed)
    world = World(tmp_path_factory.mktemp("w"), parallelism, large=large)
    repeatable = False
    changes: Changes = {}
    try:
        for what, value in [*steps, ("run", [{}])]:
            if what == "run":
                for changes in value:
                    world.run(changes, rng)
                repeatable = True
            elif what == "start":
                world.settle()
                world.start(value)
            elif what == "die":
                world.run({key(rng.randrange(8)): b"lost"}, rng, only=value)
                world.settle()
                world.start(world.parallelism)
            elif what == "repeat" and repeatable:  # Spark had not committed the newest batch
                world.settle()
                world.epoch -= 1
                world.start(value)
                world.run(changes, rng)
            elif what == "lose":
                shutil.rmtree(world.root / value, ignore_errors=True)
            elif what == "damage":
                damage(world, rng)
        world.settle()
    finally:
        shutil.rmtree(world.root, ignore_errors=True)
