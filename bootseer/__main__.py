"""`python -m bootseer`: the same program as the `bootseer` command."""

from bootseer.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
