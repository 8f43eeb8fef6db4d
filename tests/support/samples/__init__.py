"""Things with known content: sources, event files, manifests, images, wheels."""
