"""What decides what an install produces: the command, its requirements, its roots."""
