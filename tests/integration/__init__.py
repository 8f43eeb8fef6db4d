"""Real servers, mounts, containers and whole commands."""
