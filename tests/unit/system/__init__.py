"""What is Linux and not ours."""
