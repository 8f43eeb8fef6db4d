"""Killed builds, and layers and archives that lie."""
