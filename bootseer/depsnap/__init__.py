"""Snapshots of what an install changed: scan, archive, restore, node-shared tree."""
