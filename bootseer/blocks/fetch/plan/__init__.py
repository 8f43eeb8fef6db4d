"""What to ask for, of which server, and when again: pure decisions."""
