"""Starts over many jobs, kept as Parquet."""
