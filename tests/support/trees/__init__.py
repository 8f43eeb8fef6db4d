"""Trees in memory and on disk, made and compared."""
