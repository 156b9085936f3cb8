"""`dynctl demo`: the whole of it on this machine, by the same commands an operator types. IO: processes, files."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dynctl.cli.output import emit, say
from dynctl.errors import DynctlError, ExitCode, UsageError
from dynctl.files import make_writable, reason

INVENTORY = """\
# Made by `dynctl demo`: this machine, one prefill and two decode engines, simulated.
cluster: demo
hosts:
  - name: here
    address: local
    cpu_slots: 3
ports:
  base: {base}
  count: 16
deployments:
  - name: chat
    model: sim
    engine:
      kind: sim
    pools:
      - {{role: prefill, replicas: 1}}
      - {{role: decode, replicas: 2}}
    workload: {{isl_tokens: 512, osl_tokens: 64, rate_rps: 4, shared_prefix_ratio: 0.5}}
    slo: {{ttft_ms: 500, itl_ms: 50}}
    router:
      listen: 127.0.0.1:{listen}
"""

NUM_PORTS = 16
GRACE_S = 60.0


def command(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave it running and say what to type next.")
    ] = False,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the demo keeps its files.")
    ] = Path(".dynctl/demo"),
    seconds: Annotated[
        int, typer.Option("--seconds", min=1, max=600, help="Length of the bench.")
    ] = 15,
) -> None:
    """Plan, up, bench, a look at top, and down, on this machine; no GPU needed.

    Each step is an ordinary dynctl command and is printed before it runs. Nothing is left behind outside --dir,
    and nothing keeps running unless --keep is given.

    Example: dynctl demo --keep
    """
    try:
        make_writable(directory)
    except OSError as error:
        raise UsageError(
            f"--dir {directory}: cannot write there: {reason(error)}", "name another directory"
        ) from error
    listen, base = free_port(8000), free_range(18800, NUM_PORTS)
    inventory = directory / "inventory.yaml"
    inventory.write_text(INVENTORY.format(base=base, listen=listen))
    # Of an earlier demo, perhaps by other code: nobody's work.
    (directory / "plan.yaml").unlink(missing_ok=True)
    where = ["-i", str(inventory)]
    url = f"http://127.0.0.1:{listen}"
    started = time.monotonic()
    done = False
    try:
        run("plan", *where)
        run("up", *where, "--yes")
        load = [
            "--url",
            url,
            "--workload",
            "multiturn",
            "--load",
            "poisson:6",
            "--duration",
            f"{seconds}s",
            "--yes",
        ]
        bench_and_look(
            ["bench", "run", *load, "--out", str(directory / "bench")],
            ["top", *where, "--once"],
            seconds * 0.6,
        )
        done = True
    finally:
        if not (keep and done):
            run("down", *where, "--yes", *([] if done else ["--now"]), must=done)
    farewell(inventory, url, time.monotonic() - started, is_up=keep)


def farewell(inventory: Path, url: str, took_s: float, *, is_up: bool) -> None:
    """Say how long it took and what to type next."""
    if not is_up:
        say(
            f"\nDone in {took_s:.0f} s; nothing is left running. KEEP=1 make demo (or dynctl demo --keep) leaves it up."
        )
        return
    body = '{"model": "sim", "stream": true, "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}'
    say(f"\nStill running, after {took_s:.0f} s. Next:")
    say(f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    say(f"  {program()} top -i {inventory}")
    say(f"  {program()} down -i {inventory} --yes")


def program() -> str:
    """How this dynctl is called from here: it may lie in an environment that is not on the path."""
    beside = Path(sys.executable).with_name("dynctl")
    if shutil.which("dynctl") or not beside.exists():
        return "dynctl"
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def bench_and_look(bench: list[str], look: list[str], delay_s: float) -> None:
    """Run the bench, and a look at `top` in the middle of it; the look is shown when the bench is done."""
    say(f"\n$ dynctl {' '.join(bench)}")
    with started(bench) as process:
        time.sleep(delay_s)
        seen = subprocess.run(
            [sys.executable, "-m", "dynctl", *look],
            capture_output=True,
            text=True,
            timeout=GRACE_S,
            check=False,
        )
        check(process.wait(), bench)
    say(f"\n$ dynctl {' '.join(look)}   # {delay_s:.0f} s into the bench")
    emit(seen.stdout)
    check(seen.returncode, look)


@contextmanager
def started(words: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """A dynctl command as a child; an interrupt at the terminal reaches it too, so it is only waited for."""
    process = subprocess.Popen([sys.executable, "-m", "dynctl", *words])
    try:
        yield process
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait(GRACE_S)
        raise


def check(code: int, words: list[str]) -> None:
    """End with a command's own exit code unless it is 0.

    Raises:
        DynctlError: names the command.
    """
    if code != 0:
        known = {int(member) for member in ExitCode}
        raise DynctlError(
            f"dynctl {words[0]} ended with exit code {code}",
            code=ExitCode(code) if code in known else None,
        )


def run(*words: str, must: bool = True) -> None:
    """Print a dynctl command and run it to its end.

    Raises:
        DynctlError: with the command's own exit code, when it fails and must not.
    """
    say(f"\n$ dynctl {' '.join(words)}")
    with started(list(words)) as process:
        code = process.wait()
    if must:
        check(code, list(words))


def free_port(wanted: int) -> int:
    """A free loopback port, the wanted one if it is; the demo must not fail because something else runs here."""
    for port in range(wanted, wanted + 200):
        if is_free(port):
            return port
    raise DynctlError(
        f"no free port from {wanted} to {wanted + 199} on 127.0.0.1", code=ExitCode.REFUSED
    )


def free_range(wanted: int, count: int) -> int:
    """The first of `count` free ports in a row."""
    for base in range(wanted, wanted + 100 * count, count):
        if all(is_free(port) for port in range(base, base + count)):
            return base
    raise DynctlError(f"no {count} free ports in a row from {wanted} on", code=ExitCode.REFUSED)


def is_free(port: int) -> bool:
    """Whether nothing listens on a loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
