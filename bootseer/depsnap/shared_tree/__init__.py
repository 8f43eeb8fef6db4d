"""Snapshots unpacked once a node, and the forms in which a target gets one."""
