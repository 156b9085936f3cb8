"""Tell what dynctl left on this host: bundles, certificates, the agent's socket and its service.

Runs on the host, standard library only. IO: files, systemctl.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path


def digest(path: Path) -> str:
    """Name a file by its content; empty when there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def service_state(unit: str, scope: str) -> str:
    """Ask systemd about the agent's unit: `active`, `inactive`, `failed`, … or empty without systemd."""
    if scope == "none":
        return ""
    argv = ["systemctl", *(["--user"] if scope == "user" else []), "is-active", unit]
    env = {
        **os.environ,
        "XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}"),
    }
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=10, check=False, env=env
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def main() -> None:
    """Print the facts as one JSON object."""
    wish = json.loads(sys.argv[1])
    root = Path(wish["root"])
    bundles = root / "bundles"
    launch = root / "launch.json"
    facts = {
        "exists": root.exists(),
        "bundles": sorted(p.name for p in bundles.iterdir() if not p.name.startswith("."))
        if bundles.is_dir()
        else [],
        "files": {name: digest(root / name) for name in wish["files"]},
        "launch": json.loads(launch.read_text()) if launch.exists() else {},
        "service": service_state(wish["unit"], wish["scope"]),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
