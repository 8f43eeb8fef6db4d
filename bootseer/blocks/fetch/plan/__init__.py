"""What one request asks for, and when it is made again: pure decisions."""
