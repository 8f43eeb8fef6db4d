"""README's commands on a Debian that has never seen this project (`make fresh`)."""
