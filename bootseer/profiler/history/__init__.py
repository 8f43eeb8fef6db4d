"""Records of many jobs' starts, kept as Parquet, and the report over them."""
