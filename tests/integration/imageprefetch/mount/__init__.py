"""Images mounted lazily."""
