"""Checkpoints through fsspec."""
