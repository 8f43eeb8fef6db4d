"""Log rules, and events made of the words of other programs."""
