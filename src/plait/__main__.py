"""`python -m plait` is the `plait` command."""

from plait.cli.main import main

if __name__ == "__main__":
    main()
