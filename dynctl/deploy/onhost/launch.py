"""Start, restart or stop the agent: as a systemd unit where there is one, else in a session of its own.

Runs on the host, standard library only. IO: files, processes, systemctl.
"""

import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0


def systemctl(scope: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run systemctl for the system or the user manager."""
    env = {
        **os.environ,
        "XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}"),
    }
    argv = ["systemctl", *(["--user"] if scope == "user" else []), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=env)


def unit_path(scope: str, unit: str) -> Path:
    """Where the unit file belongs."""
    if scope == "system":
        return Path("/etc/systemd/system") / unit
    return (
        Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "systemd" / "user" / unit
    )


def is_listening(root: Path) -> bool:
    """Whether the agent listens where it says its socket is."""
    try:
        path = (root / "agent.socket-path").read_text().strip()
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5)
            probe.connect(path)
    except OSError:
        return False
    return True


def start_unit(wish: dict[str, str]) -> str:
    """Write the unit and (re)start it; answers an error text or an empty one."""
    path = unit_path(wish["scope"], wish["unit"])
    path.parent.mkdir(parents=True, exist_ok=True)
    (Path(wish["root"]) / "logs").mkdir(mode=0o700, exist_ok=True)
    path.write_text(wish["unit_text"])
    for words in (("daemon-reload",), ("enable", wish["unit"]), ("restart", wish["unit"])):
        done = systemctl(wish["scope"], *words)
        if done.returncode != 0:
            log = subprocess.run(
                [
                    "journalctl",
                    *(["--user"] if wish["scope"] == "user" else []),
                    "-u",
                    wish["unit"],
                    "-n",
                    "5",
                    "--no-pager",
                    "-o",
                    "cat",
                ],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
            return f"systemctl {' '.join(words)}: {done.stderr.strip()[-300:]} {log.stdout.strip()[-500:]}"
    return ""


def stop_session(root: Path) -> None:
    """End an agent that runs in its own session; engines stay."""
    try:
        pid = int((root / "agent.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return
    if b"dynctl.agents" not in command or os.fsencode(root) not in command:
        return
    try:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while is_alive(pid):
            if time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)
    except ProcessLookupError:
        # It ended between the look and the signal.
        return


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def start_session(root: Path, wish: dict[str, str]) -> str:
    """Start the agent in a session of its own, detached from this one."""
    stop_session(root)
    (root / "agent.socket-path").unlink(missing_ok=True)
    logs = root / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-sP", "-m", "dynctl.agents", "--root", str(root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": wish["bundle_path"], "DYNCTL_SCOPE": "none"},
        )
    (root / "agent.pid").write_text(str(process.pid))
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = (logs / "agent.log").read_bytes()[-600:].decode(errors="replace").strip()
            return f"the agent ended with code {process.returncode}: {tail}"
        if is_listening(root):
            return ""
        time.sleep(0.05)
    process.kill()
    return f"the agent did not answer within {START_TIMEOUT_S:.0f} s"


def drop_empty(directory: Path) -> None:
    """Remove the user's unit directories if nothing is in them any more; the first unit had made them."""
    for name in ("default.target.wants", ".", "..", "../.."):
        try:
            (directory / name).resolve().rmdir()
        except OSError:
            continue


def ensure_linger() -> str:
    """Let this user's units live on after logout; answers a note when the host does not allow it."""
    user = pwd.getpwuid(os.getuid()).pw_name
    if Path(f"/var/lib/systemd/linger/{user}").exists():
        return ""
    done = subprocess.run(
        ["loginctl", "enable-linger"], capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode == 0:
        return ""
    return f"engines end when {user} logs out, because lingering is off: sudo loginctl enable-linger {user}"


def main() -> None:
    """Do what `action` says and print the outcome."""
    wish = json.loads(sys.argv[1])
    root = Path(wish["root"])
    error = note = ""
    if wish["action"] == "start":
        if wish["scope"] == "user":
            note = ensure_linger()
        error = start_session(root, wish) if wish["scope"] == "none" else start_unit(wish)
        if not error:
            keep = {name: wish[name] for name in ("scope", "unit", "bundle_path", "python")}
            (root / "launch.json").write_text(json.dumps(keep))
    elif wish["scope"] == "none":
        stop_session(root)
    else:
        systemctl(wish["scope"], "disable", "--now", wish["unit"])
        unit_path(wish["scope"], wish["unit"]).unlink(missing_ok=True)
        systemctl(wish["scope"], "daemon-reload")
        systemctl(wish["scope"], "reset-failed", wish["unit"])
        if wish["scope"] == "user":
            drop_empty(unit_path("user", wish["unit"]).parent)
    print(json.dumps({"error": error, "note": note}))


if __name__ == "__main__":
    main()
