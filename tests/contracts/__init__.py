"""One suite for several implementations, and other projects' suites for ours."""
