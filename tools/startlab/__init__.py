"""Whole starts of a job in its container: what it needs lies behind one emulated link."""
