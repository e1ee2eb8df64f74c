"""What is needed of Spark's private surface is there, or is named in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from statebackend.errors import EnvironmentMissingError
from statebackend.spark import spark_internals
from statebackend.spark.spark_internals import check_internals, probe_internals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_this_pyspark_has_all_that_is_needed(spark: SparkSession) -> None:
    found = probe_internals(spark)
    assert [one for one in found if one.reason] == []
    assert len({one.member for one in found}) == len(found) > 5


def test_a_member_that_is_missing_is_one_sentence(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(writer: Any) -> bool:
        raise AttributeError("no field outputMode")

    probes = [
        (name, use, gone if probe.__name__ == "<lambda>" and "outputMode" in name else probe)
        for name, use, probe in spark_internals._PROBES
    ]
    monkeypatch.setattr(spark_internals, "_PROBES", tuple(probes))
    monkeypatch.setattr(spark_internals._Checked, "done", False)
    with pytest.raises(EnvironmentMissingError) as caught:
        check_internals(spark)
    text = str(caught.value)
    assert "DataStreamWriter.outputMode" in text
    assert "no field outputMode" in text
    assert "\n" not in text
