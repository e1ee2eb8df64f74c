"""The reader of the rounds sees what is missing and what is there twice: else it proves nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from tests.kafkarounds.kafkajob import catalog_of
from tests.kafkarounds.lake_reader import LakeReader, Row

if TYPE_CHECKING:
    from pathlib import Path

ONE: Row = (0, 1, 1, 1)
TWO: Row = (1, 2, 1, 2)
THREE: Row = (2, 3, 1, 3)


def rows(*given: Row) -> pa.Table:
    return pa.table(
        dict(zip(("key", "value", "n", "total"), map(list, zip(*given, strict=True)), strict=True))
    )


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_row_that_was_appended_twice_is_found_twice(tmp_path: Path, kind: str) -> None:
    append(tmp_path, kind, rows(ONE, TWO))
    append(tmp_path, kind, rows(TWO, THREE))
    assert LakeReader(kind, tmp_path).end() == Counter({ONE: 1, TWO: 2, THREE: 1})


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_rows_whose_files_the_table_has_given_up_are_not_found(tmp_path: Path, kind: str) -> None:
    append(tmp_path, kind, rows(ONE, TWO))
    append(tmp_path, kind, rows(THREE), anew=True)
    assert LakeReader(kind, tmp_path).end() == Counter({THREE: 1})


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_it_waits_for_the_first_rows_of_the_input(tmp_path: Path, kind: str) -> None:
    reader = LakeReader(kind, tmp_path)
    assert not reader.has(1)  # no table yet
    append(tmp_path, kind, rows((0, 0, 1, 0), TWO))
    assert reader.has(1)
    assert not reader.has(3)  # the row with the value 1 is missing
    append(tmp_path, kind, rows(ONE))
    assert reader.has(3)


def append(folder: Path, kind: str, given: pa.Table, *, anew: bool = False) -> None:
    lake = folder / "lake"
    if kind == "delta":
        deltalake.write_deltalake(lake / "t", given, mode="overwrite" if anew else "append")
        return
    with load_catalog("default", **catalog_of(str(lake))) as catalog:
        catalog.create_namespace_if_not_exists("lake")
        table = catalog.create_table_if_not_exists("lake.t", given.schema)
        table.overwrite(given) if anew else table.append(given)
