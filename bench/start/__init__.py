"""Bench `start`: whole starts of a job in its container, against the plain way and its limit."""
