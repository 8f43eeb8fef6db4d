"""What decides the result of an install: its command, its requirements, its roots."""
