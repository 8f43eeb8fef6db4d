"""Mounted images whose registry, server, cache or caller fails."""
