"""What a start touches: recorded, kept, merged."""
