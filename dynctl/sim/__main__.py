"""`python -m dynctl.sim`: one simulated engine in the foreground. IO: see `run`."""

import sys

from dynctl.errors import DynctlError
from dynctl.sim.options import parse_args
from dynctl.sim.run import run_engine


def main() -> int:
    """Run until a signal; returns the exit code."""
    try:
        options = parse_args(sys.argv[1:])
        run_engine(options, _say_ready)
    except DynctlError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"  {error.hint}\n")
        return int(error.exit_code)
    return 0


def _say_ready(address: str) -> None:
    sys.stdout.write(f"ready {address}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
