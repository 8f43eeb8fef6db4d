"""Bench `report`: reports of large starts, and the generator of their events."""
