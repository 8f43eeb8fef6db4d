"""The FUSE protocol, and waiting for a mount server."""
