"""One part of the package at a time: no root, servers, mounts, containers or whole commands."""
