"""Bench `fuse`: our mounts against FUSE servers in C and other Python bindings."""
