"""Crowds of readers on bad stores."""
