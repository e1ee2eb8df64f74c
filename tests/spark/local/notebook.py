"""A notebook, run as ``__main__``: each cell is compiled and executed alone, as IPython does it.

Prints one line of JSON for what the test asserts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CLASSES = """
import enum
from dataclasses import dataclass
from types import MappingProxyType

from pyspark.sql.streaming.stateful_processor import StatefulProcessor

calls = []

class Colour(enum.Enum):
    RED = 1

@dataclass
class Rate:
    factor: int

class Base(StatefulProcessor):
    def scaled(self, n):
        return n * self.rate.factor

class Scores(Base):
    class Kept:
        seen = 0

    rate = Rate(10)

    def __init__(self):
        self.table = MappingProxyType({"n": 0})  # which deepcopy cannot copy

    def init(self, handle):
        calls.append("init")
        assert Colour(1) is Colour.RED and isinstance(self.rate, Rate)
        type(self).Kept.seen += 1
        self.total = handle.getValueState("total", "n bigint")

    def handleInputRows(self, key, rows, timerValues):
        n = (self.total.get() or (0,))[0] + sum(helper(row.id) for row in rows)
        n += self.table["n"]
        self.total.update((n,))
        yield (key[0], self.scaled(n))

    def close(self):
        pass

def counting():
    count = 0
    class Counting(StatefulProcessor):
        def init(self, handle):
            nonlocal count
            count += 1
        def handleInputRows(self, key, rows, timerValues):
            return []
        def close(self):
            pass
    return Counting, lambda: count
"""

HELPER = "def helper(n):\n    return n\n"
HELPER_AGAIN = "def helper(n):\n    return 1000 + n\n"


def looks(kind: type) -> dict[str, Any]:
    """What a class is made of, by identity; without what pickle remembers of it."""
    members = {name: value for name, value in vars(kind).items() if name != "__slotnames__"}
    found = {f"{kind.__name__}.{name}": id(value) for name, value in members.items()}
    for name, value in members.items():
        if callable(value) and hasattr(value, "__globals__"):
            found[f"globals of {name}"] = id(value.__globals__)
    return found


def main(folder: Path) -> None:
    """Run the cells."""
    from pyspark.sql import Row, SparkSession

    from statebackend import ProcessorTester
    from tests.spark.local.world import World, finish

    notebook = sys.modules["__main__"].__dict__

    def cell(text: str) -> None:
        exec(compile(text, "<cell>", "exec"), notebook)

    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.shuffle.reduceLocality.enabled", "false")
        .getOrCreate()
    )
    found: dict[str, Any] = {}
    worlds = []

    def total(name: str) -> list[Any]:
        """The output of a job of its own for ids 1 and 2."""
        world = World(spark, folder / name)
        worlds.append(world)
        world.input.add_keys("a", "a")
        backend = world.backend(parallelism=2)
        frame = backend.transform_with_state(
            world.input.stream(spark),
            keys="k",
            processor=notebook["Scores"](),
            output_schema="k string, n bigint",
            uid="scores",
        )
        finish(world.start(backend, frame))
        return [row["n"] for row in world.sink.rows()]

    def changes() -> list[str]:
        return [
            name
            for kind, known in zip(kinds, before, strict=True)
            for name, value in looks(kind).items() | known.items()
            if known.get(name) != looks(kind).get(name)
        ]

    def tested() -> list[Any]:
        with ProcessorTester(notebook["Scores"]()) as tester:
            return [list(row) for row in tester.test("a", [Row(id=2)])]

    cell(CLASSES)
    cell(HELPER)
    kinds = [notebook[name] for name in ("Scores", "Base", "Rate", "Colour")]
    kinds.append(notebook["Scores"].Kept)
    before = [looks(kind) for kind in kinds]
    names = set(notebook)
    found["first"] = total("first")
    found["changed"] = changes()
    found["new names"] = sorted(set(notebook) - names)
    found["globals"] = notebook["Scores"].handleInputRows.__globals__ is notebook
    found["calls"] = list(notebook["calls"])
    found["kept"] = notebook["Scores"].Kept.seen
    cell(HELPER_AGAIN)
    found["second"] = total("second")
    counting, count = notebook["counting"]()
    world = worlds[-1]
    world.backend(uri=(folder / "counting").as_uri()).transform_with_state(
        world.input.stream(spark),
        keys="k",
        processor=counting(),
        output_schema="k string",
        uid="counting",
    )
    counting().init(None)
    found["counted"] = count()
    found["tested again"] = tested()
    cell(HELPER)
    found["tested"] = tested()
    found["changed by a tester"] = [one for one in changes() if "seen" not in one]
    for world in worlds:
        for backend in world.backends:
            backend.close()
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
