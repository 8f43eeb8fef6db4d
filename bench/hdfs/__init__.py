"""Bench `hdfs`: checkpoints on a real HDFS behind capped links."""
