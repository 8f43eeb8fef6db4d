"""Layers and what becomes of them in a block image."""
