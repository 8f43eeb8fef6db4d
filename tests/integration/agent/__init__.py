"""The node's agent, with real processes and mounts."""
