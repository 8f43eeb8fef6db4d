"""Settings: from defaults, `bootseer.toml`, the environment and flags to checked values."""
