"""Checkpoints in real mounts."""
