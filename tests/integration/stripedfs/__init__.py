"""Striped checkpoints on web servers and HDFS, with many at work at once."""
