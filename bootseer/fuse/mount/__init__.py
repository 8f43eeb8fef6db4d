"""Mounted `/dev/fuse` descriptors: mounting, unmounting, and what is mounted."""
