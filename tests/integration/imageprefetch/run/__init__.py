"""Containers of mounted images, and recorded starts."""
