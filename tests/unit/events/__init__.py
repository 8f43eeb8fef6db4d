"""The event writer."""
