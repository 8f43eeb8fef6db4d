"""Memory over very many reads."""
