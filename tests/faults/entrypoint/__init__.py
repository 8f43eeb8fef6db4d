"""Faults of ours during a start, which the job must not notice."""
