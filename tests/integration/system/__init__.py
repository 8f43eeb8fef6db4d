"""System calls on real mounts."""
