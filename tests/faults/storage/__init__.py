"""Stores whose servers break, hang or lie."""
