"""Stores without a server."""
