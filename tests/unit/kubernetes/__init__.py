"""Injection into manifests, and checks of them."""
