"""The report as text, page, JSON, trace and metrics."""
