"""The same answers in plain pandas, over all flights at once: no Spark, no state, no epochs.

Written from the description in `processor.py`, in another way, so that a mistake in one shows.
"""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("tailnum", pa.string()),
        ("legs", pa.int64()),
        ("flown", pa.int64()),
        ("cancelled", pa.int64()),
        ("diverted", pa.int64()),
        ("last_arrival", pa.timestamp("us")),
        ("late_min", pa.int64()),
        ("recovered_min", pa.int64()),
        ("tight_turns", pa.int64()),
        ("last_tight_min", pa.list_(pa.int32())),
        ("favourite", pa.string()),
    ]
)


def by_aircraft(flights: pd.DataFrame) -> pa.Table:
    """One row per aircraft, with the columns of the stream's output."""
    ordered = flights.sort_values(["tailnum", "scheduled", "flight"], ignore_index=True)
    flown = _with_times(ordered[ordered["dep_delay"].notna()])
    result = pd.DataFrame({"legs": ordered.groupby("tailnum").size()})
    legs = flown.groupby("tailnum")
    result["flown"] = _counts(legs.size(), result)
    result["cancelled"] = result["legs"] - result["flown"]
    result["diverted"] = _counts(legs["landed"].apply(lambda landed: landed.isna().sum()), result)
    result["last_arrival"] = legs["landed"].apply(lambda landed: landed.iloc[-1])
    result["late_min"] = _counts(legs["late"].sum(), result)
    result["recovered_min"] = _counts(legs["recovered"].sum(), result)
    tight = flown[flown["ground_min"].between(0, 120, inclusive="left")]
    turns = tight.groupby("tailnum")["ground_min"]
    result["tight_turns"] = _counts(turns.size(), result)
    last = turns.apply(lambda minutes: [int(m) for m in minutes.iloc[-3:]])
    result["last_tight_min"] = [last.get(tailnum, []) for tailnum in result.index]
    result["favourite"] = _favourites(flown).reindex(result.index)
    return pa.Table.from_pandas(result.reset_index(), schema=SCHEMA, preserve_index=False)


def _counts(values: pd.Series, like: pd.DataFrame) -> pd.Series:
    return values.reindex(like.index).fillna(0).astype("int64")


def _with_times(flown: pd.DataFrame) -> pd.DataFrame:
    flown = flown.copy()
    late, air = flown["dep_delay"].astype("int64"), flown["air_time"].astype("float64")
    arrived_late = flown["arr_delay"].astype("float64")
    known = air.notna() & arrived_late.notna()
    departed = flown["scheduled"] + pd.to_timedelta(late, unit="min")
    landed = departed + pd.to_timedelta(air, unit="min")
    flown["landed"] = landed.where(known)
    flown["late"] = late.clip(lower=0)
    made_good = (flown["late"] - arrived_late.clip(lower=0)).clip(lower=0)
    flown["recovered"] = made_good.where(known, 0)
    back = (flown["landed"] + pd.to_timedelta(air, unit="min")).groupby(flown["tailnum"]).shift()
    flown["ground_min"] = (departed - back).dt.total_seconds() / 60
    return flown


def _favourites(flown: pd.DataFrame) -> pd.Series:
    trips = flown.groupby(["tailnum", "dest"]).size().reset_index(name="trips")
    ranked = trips.sort_values(["tailnum", "trips", "dest"], ascending=[True, False, True])
    return ranked.drop_duplicates("tailnum").set_index("tailnum")["dest"]
