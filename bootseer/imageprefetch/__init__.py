"""Container images that start before they are pulled."""
