"""Run one program of the machine and say what failed. IO: processes."""

import subprocess
from collections.abc import Sequence


class LabError(Exception):
    """Raised when the lab itself cannot do what a test asked of it."""


def run(
    argv: Sequence[str],
    *,
    check: bool = True,
    timeout_s: float = 60.0,
    stdin: str | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end and return its texts.

    Raises:
        LabError: when `check` is set and it exits with anything but 0, or when it does not end in time.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(argv)}: not done after {timeout_s:g} s") from error
    if check and done.returncode != 0:
        last = (done.stderr or done.stdout).strip()[-800:]
        raise LabError(f"{' '.join(argv)}: exit {done.returncode}: {last}")
    return done
