"""CPU time of starting the command line, against a bare interpreter and one that imports typer, in the same run."""

import resource
import subprocess
import sys

CASES = {
    "python -c pass": ["-c", "pass"],
    "import typer": ["-c", "import typer"],
    "dynctl --help": ["-m", "dynctl", "--help"],
    "dynctl --version": ["-m", "dynctl", "--version"],
    "dynctl up --help": ["-m", "dynctl", "up", "--help"],
}
ROUNDS = 15


def cpu_s(args):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


best = {name: float("inf") for name in CASES}
for _ in range(ROUNDS):
    for name, args in CASES.items():
        best[name] = min(best[name], cpu_s(args))
bare = best["python -c pass"]
for name, seconds in best.items():
    print(f"{name:<20} {seconds * 1e3:6.1f} ms CPU  {seconds / bare:5.1f} x bare interpreter")
