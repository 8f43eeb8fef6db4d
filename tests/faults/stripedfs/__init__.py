"""Damaged checkpoints, killed writers, and an HDFS that breaks below them."""
