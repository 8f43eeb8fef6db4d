"""Checkpoints opened, read and copied out."""
