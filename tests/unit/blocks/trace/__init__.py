"""Traces of blocks and their replay."""
