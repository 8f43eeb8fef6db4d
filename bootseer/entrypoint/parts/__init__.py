"""The parts of a start: each prepares one thing while the others do."""
