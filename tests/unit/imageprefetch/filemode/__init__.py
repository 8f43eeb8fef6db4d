"""Traces of files."""
