"""Stores: named byte objects under a URL, with one contract for every kind."""
