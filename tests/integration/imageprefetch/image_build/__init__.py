"""Builds of block images, compared with what podman unpacks."""
