"""Real servers for tests, and proxies that spoil their answers."""
