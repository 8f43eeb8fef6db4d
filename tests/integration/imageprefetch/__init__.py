"""Images from a real registry."""
