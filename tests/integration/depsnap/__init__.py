"""Dependency snapshots with real pip and uv."""
