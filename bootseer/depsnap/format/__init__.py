"""The archive: how it is laid out, written, read and checked."""
