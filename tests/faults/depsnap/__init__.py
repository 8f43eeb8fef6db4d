"""Kills, races, corruption and hung stores of dependency snapshots."""
