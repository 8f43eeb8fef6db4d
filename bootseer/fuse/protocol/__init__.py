"""The kernel's FUSE protocol: bytes to records and back, no I/O."""
