"""Kills of the snapshotter and of its helper."""
