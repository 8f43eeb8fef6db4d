"""What an install changed: scans of its roots before and after."""
