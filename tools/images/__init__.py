"""Images that tests, the demo and benches run, made without a daemon."""
