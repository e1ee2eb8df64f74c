"""Savepoints as Parquet files with a manifest in JSON, which need none of this to be read."""
