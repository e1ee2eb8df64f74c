"""A driver program that has Spark's tasks write a savepoint; it is told what to do as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import statebackend
from recovery.drill.cluster.local_cluster import SHORT_LIVED
from statebackend import OperatorState


def main() -> None:
    told = json.loads(sys.argv[1])
    root = Path(told["root"])
    (root / "scratch").mkdir(exist_ok=True)
    spark = (
        SparkSession.builder.master(told["master"])
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .config("spark.executor.extraJavaOptions", SHORT_LIVED)
        .config("spark.local.dir", str(root / "spark"))
        .config("spark.log.level", "ERROR")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    rows = spark.range(0, told["rows"], 1, 2).select(
        F.concat(F.lit("u"), F.col("id") % told["keys"]).alias("user"),
        F.lit(0).alias("index"),
        F.col("id").alias("n"),
    )
    one = OperatorState("user string", {"all": rows, "last": rows.drop("index")})
    made = statebackend.write_savepoint(
        told["to"],
        {"op": one},
        on_spark=True,
        parallelism=told["parallelism"],
        max_parallelism=128,
        scratch_dir=str(root / "scratch"),
    )
    (root / f"result-{told['name']}.json").write_text(json.dumps({"objects": made.objects}))
    spark.stop()


if __name__ == "__main__":
    main()
