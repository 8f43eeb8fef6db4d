"""The node's agent: a Python that has imported what its tasks need, and forks for each request."""
