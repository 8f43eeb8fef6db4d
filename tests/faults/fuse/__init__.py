"""Mount servers that are killed under load."""
