"""Balances of accounts: transformWithStateInPandas, written by a foreachBatch function.

    python balances.py FOLDER

Each run adds a file of payments to the folder, takes it in, and prints the balances.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

PAYMENTS = 24  # in a file
OUTPUT = "account string, cents bigint, currencies string"


class Balances(StatefulProcessor):
    """The sum of each account's payments, and how many there were in each currency."""

    def init(self, handle: Any) -> None:
        self.balance = handle.getValueState("balance", "cents bigint")
        self.currencies = handle.getMapState("currencies", "code string", "n bigint")

    def handleInputRows(
        self, key: tuple[str], rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        (cents,) = self.balance.get() or (0,)
        for frame in rows:
            cents += int(frame.cents.sum())
            for code, n in frame.currency.value_counts().items():
                (before,) = self.currencies.getValue((code,)) or (0,)
                self.currencies.updateValue((code,), (before + int(n),))
        self.balance.update((cents,))
        counted = sorted((code, n) for (code,), (n,) in self.currencies.iterator())
        yield pd.DataFrame(
            {
                "account": [key[0]],
                "cents": [cents],
                "currencies": [" ".join(f"{code}:{n}" for code, n in counted)],
            }
        )

    def close(self) -> None:
        pass


def add_payments(folder: Path) -> None:
    """The next file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = len(list(folder.iterdir()))
    rows = [
        {
            "account": f"a{number % 4}",
            "cents": number * 37 % 500 - 200,
            "currency": ("EUR", "NOK", "USD")[number % 3],
        }
        for number in range(file * PAYMENTS, (file + 1) * PAYMENTS)
    ]
    (folder / f"{file}.json").write_text("\n".join(map(json.dumps, rows)))


def main(spark: SparkSession, folder: str) -> list[Row]:
    add_payments(Path(folder, "payments"))
    schema = "account string, cents bigint, currency string"
    payments = spark.readStream.schema(schema).json(f"{folder}/payments")
    balances = payments.groupBy("account").transformWithStateInPandas(
        statefulProcessor=Balances(),
        outputStructType=OUTPUT,
        outputMode="Update",
        timeMode="None",
    )

    def write(frame: DataFrame, batch: int) -> None:
        # Again after a failure, a batch takes its own place: each row counts once.
        frame.write.mode("overwrite").json(f"{folder}/balances/batch={batch}")

    query = (
        balances.writeStream.foreachBatch(write)
        .outputMode("update")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    written = spark.read.schema(f"{OUTPUT}, batch int").json(f"{folder}/balances")
    newest = [F.max_by(name, "batch").alias(name) for name in ("cents", "currencies")]
    return written.groupBy("account").agg(*newest).orderBy("account").collect()


if __name__ == "__main__":
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.shuffle.reduceLocality.enabled", "false")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .getOrCreate()
    )
    print(*main(session, sys.argv[1]), sep="\n")
