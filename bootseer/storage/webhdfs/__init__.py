"""HDFS over WebHDFS, its REST interface."""
