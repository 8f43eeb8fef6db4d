"""Checkpoints as mounted directories."""
