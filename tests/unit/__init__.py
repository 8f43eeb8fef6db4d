"""One part of the package at a time: no servers, mounts or containers. `make test-fast`."""
