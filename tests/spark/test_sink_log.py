"""The log of a file sink where a query begins with a savepoint: which files, into which folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statebackend.errors import CheckpointLocationError
from statebackend.spark.start.sink_log import SinkLog, batches_before


class Cut(Exception):
    pass


class Folder:
    """Files in memory; a write beyond `writes` does not happen any more."""

    path = "/out"

    def __init__(self, *names: str, text: bytes = b"v1", writes: int = 1 << 20) -> None:
        self.found = {f"_spark_metadata/{name}": text for name in names}
        self.writes = writes

    def files(self, folder: str) -> list[str]:
        return [name for name in self.found if name.startswith(f"{folder}/")]

    def chunks(self, name: str) -> Iterator[bytes]:
        yield self.found[name]

    def write(self, name: str, pieces: Iterator[bytes]) -> None:
        if not self.writes:
            raise Cut
        self.writes -= 1
        self.found[name] = b"".join(pieces)

    @property
    def names(self) -> list[str]:
        return [name.removeprefix("_spark_metadata/") for name in self.found]


def spark_interval(names: list[str], default: int) -> int:
    """`CompactibleFileStreamLog.compactInterval`, as Spark 4.3 has it."""
    found = (int(n.removesuffix(".compact")) for n in names if n.endswith(".compact"))
    together: list[int] = sorted(found, reverse=True)
    if len(together) >= 2:
        return together[0] - together[1]
    if not together:
        return default
    count: int = together[0] + 1
    if count <= default:
        return count
    if default < count // 2:
        divisors = (n for n in range(default, count // 2 + 1) if count % n == 0)
        return min(divisors, default=count)
    return count


def spark_needs(batch: int, interval: int) -> list[str]:
    """What Spark reads to list the files up to a batch, or to put the log together in it."""
    start = max(0, (batch + 1) // interval * interval - 1)
    if (batch + 1) % interval == 0:
        start = max(0, batch - interval)
    return [f"{n}.compact" if (n + 1) % interval == 0 else str(n) for n in range(start, batch)]


@pytest.mark.parametrize(
    ("epoch", "names"),
    [
        (0, ["0"]),
        (3, ["0", "1", "2", "3"]),
        (9, ["9.compact"]),
        (12, ["9.compact", "10", "11", "12"]),
        (19, ["9.compact", "19.compact"]),
        (1008, ["989.compact", "999.compact", *map(str, range(1000, 1009))]),
    ],
)
def test_the_log_goes_on_as_that_of_any_query(epoch: int, names: list[str]) -> None:
    assert batches_before(epoch, 10) == names


@given(epoch=st.integers(0, 5000), interval=st.integers(1, 50), more=st.integers(1, 120))
def test_spark_keeps_its_interval_and_finds_every_batch(
    epoch: int, interval: int, more: int
) -> None:
    names = batches_before(epoch, interval)
    assert names[-1].removesuffix(".compact") == str(epoch)
    assert spark_interval(names, interval) == interval
    for batch in range(epoch + 1, epoch + 1 + more):
        assert set(spark_needs(batch, interval)) <= set(names)
        names.append(f"{batch}.compact" if (batch + 1) % interval == 0 else str(batch))


def test_a_new_folder_is_prepared_and_one_that_goes_on_is_left_as_it_is() -> None:
    folder = Folder()
    log = SinkLog(folder, 10)
    log.check(12)
    log.begin(12)
    assert folder.names == ["9.compact", "10", "11", "12"]
    log.check(12)
    before = dict(folder.found)
    log.begin(12)
    assert folder.found == before
    copied = Folder("0", "1", "2", text=b'v1\n{"path":"x"}')
    SinkLog(copied, 10).check(2)
    SinkLog(copied, 10).begin(2)
    assert set(copied.found.values()) == {b'v1\n{"path":"x"}'}


@pytest.mark.parametrize("epoch", [0, 3, 12, 19, 25])
def test_a_preparation_that_is_cut_anywhere_is_repeated(epoch: int) -> None:
    for writes in itertools.count():
        folder = Folder(writes=writes)
        log = SinkLog(folder, 10)
        try:
            log.begin(epoch)
        except Cut:
            folder.writes = 100
            log.check(epoch)
            log.begin(epoch)
            assert sorted(folder.names) == sorted(batches_before(epoch, 10))
        else:
            break
    assert writes == len(batches_before(epoch, 10))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["0", "1", "2", "3", "4", "5"], "up to 5 already"),
        (["9.compact", "10", "11", "12", "13"], "up to 13 already"),
        (["0", "1", "2"], "batches up to 2, and"),
        (["0"], "batches up to 0, and"),
    ],
)
def test_a_folder_with_other_batches_is_refused(names: list[str], said: str) -> None:
    folder = Folder(*names, text=b'v1\n{"path":"x"}')
    before = dict(folder.found)
    with pytest.raises(CheckpointLocationError, match=said):
        SinkLog(folder, 10).check(4)
    assert folder.found == before


def test_what_is_no_batch_is_not_looked_at() -> None:
    SinkLog(Folder("notes", "7.tmp"), 10).check(3)
