"""Formats of block images, and the parts of the server of one."""
