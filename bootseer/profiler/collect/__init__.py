"""Where events come from besides the job itself: logs, pip, imports, /proc, the cluster."""
