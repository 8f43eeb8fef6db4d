"""From event files to spans: read, paired, identified, their clocks corrected."""
