"""The short cut to small frames: the same frames, and pandas itself as it was afterwards."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.operators.pandas_frames import dataframe_shortcut
from statebackend.operators.pandas_frames.dataframe_shortcut import quick_frames, quick_manager

PLAIN = [
    st.integers(),
    st.integers(-5, 5),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.none(),
    st.integers(-5, 5).map(np.int64),
    st.floats().map(np.float64),
    st.booleans().map(np.bool_),
    st.sampled_from(
        [
            Decimal(1),
            dt.date(2024, 1, 2),
            dt.datetime(2024, 1, 2),
            pd.Timestamp(5),
            pd.NaT,
            pd.NA,
            b"x",
            np.int32(5),
            np.float32(0.5),
            1j,
            "2024-01-02",
            [1],
            {"a": 1},
        ]
    ),
]


@st.composite
def columns(draw: st.DrawFn, rows: int) -> Any:
    """A column of so many rows, in one form or another; sometimes of one row more."""
    values = draw(st.sampled_from([*PLAIN, *PLAIN, st.one_of(PLAIN)]))
    size = rows + (draw(st.integers(0, 20)) == 20)
    column = draw(st.lists(values, min_size=size, max_size=size))
    form = draw(st.sampled_from(["list", "list", "tuple", "single", "array", "series"]))
    if form == "single":
        return draw(values)
    if form == "array":
        return np.arange(size)
    return {"list": list, "tuple": tuple, "series": lambda _: pd.Series(range(size))}[form](column)


NAMES = st.sampled_from(["k", "n", "a b", "", 5, None, ("t",), np.str_("s")])
DATA = st.integers(0, 3).flatmap(
    lambda rows: st.dictionaries(
        st.sampled_from(["k", "n", "v", "w"]) | NAMES, columns(rows), max_size=5
    )
)


def made(data: Any, **options: Any) -> pd.DataFrame | str:
    """A frame, or the error's name."""
    try:
        return pd.DataFrame(data, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=400, deadline=None)
@given(data=DATA)
def test_a_frame_is_the_one_that_pandas_makes(data: dict[Any, Any]) -> None:
    expected = made(data)
    with quick_frames():
        found = made(data)
    assert type(found) is type(expected)
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
        return
    pd.testing.assert_frame_equal(
        found, expected, check_exact=True, check_column_type="exact", check_index_type="exact"
    )
    assert type(found.index) is type(expected.index)
    types = [[type(v) for v in frame.to_numpy(object).ravel()] for frame in (found, expected)]
    assert types[0] == types[1]


@pytest.mark.parametrize(
    "data",
    [
        {"k": ["a"], "n": [1]},
        {"k": ("a",), "n": "1"},
        {"k": "a", "n": [1], "x": [0.5], "b": [True]},
        {"k": ["a", "b"], "n": [np.int64(1), np.int64(2)], "m": 3},
    ],
)
def test_the_usual_small_frames_are_made_the_short_way(data: dict[str, Any]) -> None:
    assert quick_manager()(data) is not None


def test_changing_a_frame_or_what_it_was_made_of_changes_nothing_else() -> None:
    with quick_frames():
        values = [1]
        frame = pd.DataFrame({"k": ["a"], "n": values})
        values[0] = 5
        assert frame["n"].tolist() == [1]
        frame.loc[0, "k"] = "b"
        frame.index.name, frame.columns.name = "row", "column"
        frame["new"] = frame["n"] * 2
        again = pd.DataFrame({"k": ["a"], "n": [1]})
    assert again.to_dict("list") == {"k": ["a"], "n": [1]}
    assert (again.index.name, again.columns.name) == (None, None)
    assert frame.to_dict("list") == {"k": ["b"], "n": [1], "new": [2]}


def test_other_ways_to_make_a_frame_work_as_ever() -> None:
    class Special(pd.DataFrame):  # type: ignore[misc]
        pass

    data = {"k": ["a"], "n": [1]}
    with quick_frames():
        assert type(Special(data)) is Special
        assert pd.DataFrame(data, index=[7]).index.tolist() == [7]
        assert pd.DataFrame(data, ["r"], ["n"]).to_dict("list") == {"n": [1]}
        assert str(pd.DataFrame(data, dtype=object)["n"].dtype) == "object"
        assert pd.DataFrame([("a", 1)], columns=["k", "n"]).equals(pd.DataFrame(data))
        assert pd.DataFrame().empty
        assert pd.DataFrame(pd.DataFrame(data)).equals(pd.DataFrame(data=data))
        with pd.option_context("future.infer_string", True):
            assert pd.DataFrame({"k": ["a"]})["k"].dtype != object


def test_pandas_is_as_it_was_afterwards_whatever_happened() -> None:
    before = pd.DataFrame.__init__
    with quick_frames(), quick_frames():
        assert pd.DataFrame.__init__ is not before
    with pytest.raises(ValueError, match="length"), quick_frames():
        pd.DataFrame({"k": ["a"], "n": [1, 2]})
    assert pd.DataFrame.__init__ is before


def test_a_pandas_that_it_does_not_know_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_parts() -> Any:
        raise ImportError

    monkeypatch.setattr(dataframe_shortcut, "quick_manager", no_parts)
    monkeypatch.setattr(dataframe_shortcut, "_checked", dataframe_shortcut._checked.__wrapped__)
    before = pd.DataFrame.__init__
    with quick_frames():
        assert pd.DataFrame.__init__ is before
