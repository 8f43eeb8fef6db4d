"""Images whose registry, server, builder or layers fail."""
