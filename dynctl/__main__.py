"""`python -m dynctl` is the `dynctl` command."""

from dynctl.cli.main import main

if __name__ == "__main__":
    main()
