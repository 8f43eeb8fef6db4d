"""Checkpoints written, published, resumed and collected."""
