"""Builds the init container image (`make image`): no daemon; same input, same bytes."""
