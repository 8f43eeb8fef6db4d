"""The shell's event writer, and the writer under Python 3.9."""
