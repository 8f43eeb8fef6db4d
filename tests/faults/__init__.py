"""Kills, full disks, cut links and hostile input."""
