"""The node cache."""
