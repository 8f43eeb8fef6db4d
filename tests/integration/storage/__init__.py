"""Stores on real web servers, HDFS clusters and registries."""
