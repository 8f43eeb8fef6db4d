"""Sources of events besides the job itself: logs, pip, imports, /proc, Docker and Kubernetes."""
