"""Benchmarks still run and find the right bytes; nothing is timed."""
