"""A real Kubernetes of one node for tests: built from Debian's sources, in own namespaces."""
