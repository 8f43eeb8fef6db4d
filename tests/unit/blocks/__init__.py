"""Extents, tables and counters of blocks."""
