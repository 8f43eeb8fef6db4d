"""Events of real processes, and the report in a browser."""
