"""Describe many hosts over real SSH handshakes: servers in one process of this machine, each with tools of its own.

Four of them are ill: one never says a word, so that it takes its whole time limit, the driver of one hangs, the login
shell of one talks, one drops the connection half-way. Prints what a user waits and what memory it takes; ends with 1 when a bound is missed.

    .venv/bin/python benchmarks/discover_hosts.py [--hosts 64] [--well]
"""

# ruff: noqa: PLC0415 - the servers import nothing of ours, the measured side nothing of theirs
import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = {"ill": 18.0, "well": 8.0}
"""The probe limit and 8 s; 8 s when no driver hangs."""
LIMIT_BYTES = 250 * 2**20
ILL = ("unreachable", "hanging", "noisy", "dropping")
SAMPLE = (
    Path(__file__).parents[1]
    / "tests/discovery/cases/nvidia_smi_topo/dgx-a100-8gpu-12nic/stdout.txt"
)

_SMI = r"""#!/bin/sh
case "$*" in
  "topo -m") cat "{topo}" ;;
  topo*) echo ;;
  -L) i=0; while [ $i -lt 8 ]; do echo "GPU $i: NVIDIA A100-SXM4-80GB (UUID: GPU-0000000$i-0000-0000-0000-00000000{number:04d})"; i=$((i+1)); done ;;
  nvlink*) echo ;;
  *query-gpu*) i=0; while [ $i -lt 8 ]; do echo "$i, GPU-0000000$i-0000-0000-0000-00000000{number:04d}, NVIDIA A100-SXM4-80GB, 00000000:0$i:00.0, 81920, 4, 570.1, Disabled"; i=$((i+1)); done ;;
  "-q -x") echo "<nvidia_smi_log><driver_version>570.1</driver_version></nvidia_smi_log>" ;;
  *) echo "No running processes found" ;;
esac
"""
_HANGS = "#!/bin/sh\nexec sleep 1000\n"


@dataclass(frozen=True)
class Farm:
    """Where the servers are."""

    ports: dict[str, int]
    known_hosts: str
    key: str


def tools(folder: Path, number: int, kind: str) -> Path:
    """Write the tools of one host; return the directory for its PATH."""
    place = folder / f"bin-{number}"
    place.mkdir()
    text = _HANGS if kind == "hanging" else _SMI.replace("{topo}", str(SAMPLE)).replace("{number:04d}", f"{number:04d}")  # fmt: skip
    (place / "nvidia-smi").write_text(text)
    (place / "nvidia-smi").chmod(0o755)
    return place


async def serve(names: list[str], folder: Path) -> None:
    """Run the servers until stdin closes; print their ports as one JSON line."""
    import asyncssh

    host_key = asyncssh.generate_private_key("ssh-ed25519")
    user_key = asyncssh.generate_private_key("ssh-ed25519")
    user_key.write_private_key(str(folder / "id"))
    (folder / "id.pub").write_bytes(user_key.export_public_key())
    authorized = asyncssh.import_authorized_keys(user_key.export_public_key().decode())
    ports = {}
    async with contextlib.AsyncExitStack() as stack:
        for number, name in enumerate(names):
            if name == "unreachable":
                silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                ports[name] = silent.getsockname()[1]
                continue
            place = tools(folder, number, name)
            server = await asyncssh.listen(
                "127.0.0.1",
                0,
                server_host_keys=[host_key],
                authorized_client_keys=authorized,
                process_factory=_shell(name, place),
                encoding=None,
            )
            stack.callback(server.close)
            ports[name] = server.get_port()
        public = host_key.export_public_key().decode().strip()
        lines = [f"[127.0.0.1]:{port} {public}\n" for port in ports.values()]
        (folder / "known_hosts").write_text("".join(lines))
        print(json.dumps(ports), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def _shell(name: str, place: Path):
    async def run(process) -> None:
        if name == "noisy":
            process.stdout.write(b"\x1b[31mWelcome!\x1b[0m\r\n" + b"You have mail.\n" * 200)
            process.stderr.write(b"tput: unknown terminal\n" * 50)
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", process.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PATH": f"{place}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
        )  # fmt: skip
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_feed(process, child))
                sent = 0
                while data := await child.stdout.read(65536):
                    sent += len(data)
                    if name == "dropping" and sent > 500:
                        process.channel.get_connection().abort()
                        return
                    process.stdout.write(data)
                process.exit(await child.wait())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()

    return run


async def _feed(process, child) -> None:
    import asyncssh

    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await process.stdin.read(65536):
            child.stdin.write(data)
            await child.stdin.drain()
    child.stdin.close()


@contextlib.asynccontextmanager
async def farm(names: list[str]):
    """Start the servers in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--serve", folder, *names,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            ports = json.loads(await asyncio.wait_for(child.stdout.readline(), 60))
            yield Farm(ports, f"{folder}/known_hosts", f"{folder}/id")
        finally:
            child.kill()
            await child.wait()
            child._transport.close()  # noqa: SLF001 - as every subprocess in these tests


async def describe(where: Farm):
    """Describe all hosts as the command does; return the topology and how long it took."""
    from dynctl.core.inventory import HostEntry, SshSettings
    from dynctl.discovery.discover import discover
    from dynctl.remote.fleet import open_fleet

    entries = [
        HostEntry(name, "127.0.0.1", user="ops", port=port, key=where.key)
        for name, port in where.ports.items()
    ]
    settings = SshSettings(config=None, known_hosts=where.known_hosts)
    began = time.monotonic()
    async with open_fleet(entries, settings) as fleet:
        topology = await discover(entries, fleet)
    return topology, time.monotonic() - began


def names_of(count: int, *, is_well: bool) -> list[str]:
    """Host names; the ill ones are called by their illness."""
    ill = [] if is_well else list(ILL)
    return ill + [f"gpu-{i:02d}" for i in range(count - len(ill))]


def problems(
    topology, names: list[str], took_s: float, used_bytes: int, limit_s: float
) -> list[str]:
    """What is not as it must be."""
    failed = {failure.name: failure.cause for failure in topology.failures}
    hosts = {host.name: host for host in topology.hosts}
    found = [f"{name} is named without a cause" for name, cause in failed.items() if not cause]
    found += [f"{name} should have failed" for name in ("unreachable", "dropping") if name in names and name not in failed]  # fmt: skip
    for name in names:
        if name.startswith("gpu-") or name == "noisy":
            host = hosts.get(name)
            if host is None or len(host.gpus) != 8 or host.nvlink_islands != (tuple(range(8)),):
                found.append(f"{name} is not complete: {failed.get(name, 'wrong facts')}")
    if "hanging" in names:
        codes = {w.code for w in hosts["hanging"].warnings} if "hanging" in hosts else set()
        if "gpu-timeout" not in codes:
            found.append(f"the hanging driver is not named: {failed.get('hanging', codes)}")
    if "noisy" in names:
        codes = {w.code for w in hosts["noisy"].warnings} if "noisy" in hosts else set()
        if "login-noisy" not in codes:
            found.append("the login shell that talks is not named")
    if took_s > limit_s:
        found.append(f"took {took_s:.1f} s, more than {limit_s:g} s")
    if used_bytes > LIMIT_BYTES:
        found.append(f"used {used_bytes / 2**20:.0f} MiB, more than {LIMIT_BYTES / 2**20:.0f}")
    return found


async def main(count: int, *, is_well: bool) -> int:
    """Measure once."""
    names = names_of(count, is_well=is_well)
    limit_s = LIMIT_S["well" if is_well else "ill"]
    async with farm(names) as where:
        topology, took_s = await describe(where)
    used = resource.getrusage(resource.RUSAGE_SELF)
    used_bytes = used.ru_maxrss * 1024
    print(f"hosts       {len(names)}, {len(topology.hosts)} described, {len(topology.failures)} failed, on {os.cpu_count()} cores")  # fmt: skip
    print(f"wall        {took_s:.2f} s of {limit_s:g} s")
    print(f"this end    {used.ru_utime + used.ru_stime:.2f} s CPU, {used_bytes / 2**20:.0f} MiB of {LIMIT_BYTES / 2**20:.0f}")  # fmt: skip
    for failure in topology.failures:
        print(f"  {failure.name}: {failure.cause}")
    for host in topology.hosts:
        for warning in host.warnings if host.name in ILL else ():
            if warning.code.startswith(("gpu-timeout", "probe", "login")):
                print(f"  {host.name}: {warning.text} [{warning.code}]")
    wrong = problems(topology, names, took_s, used_bytes, limit_s)
    print("\n".join(wrong) or "all bounds kept")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(sys.argv[3:], Path(sys.argv[2])))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--well", action="store_true", help="no ill host")
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.hosts, is_well=options.well)))
