"""From event files to the report as data."""
