"""Fork servers, clients and tasks that are killed."""
