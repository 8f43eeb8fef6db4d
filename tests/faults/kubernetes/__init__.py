"""What goes wrong in a cluster."""
