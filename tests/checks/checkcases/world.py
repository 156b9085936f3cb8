"""A world a verify command runs in: tools of our own making on PATH, and files below a directory of the test.

What cannot be had here (a GPU driver, an RDMA device) is played; everything else is the machine's own: sh, awk, grep,
find, ss, ip, openssl, curl, ssh, and the tests' own processes, ports and files.
"""

import os
import subprocess
from dataclasses import dataclass, field


@dataclass(frozen=True)
class World:
    """What holds while a command runs."""

    tools: dict[str, str] = field(default_factory=dict)
    """Name to a shell script; `smi` and `says` write common ones."""
    files: dict[str, str] = field(default_factory=dict)
    """Absolute path to content: the command sees them under its own paths, which are moved below the test's directory."""
    before: str = ""
    """Shell text in front of the command, e.g. a ulimit."""
    absent: tuple[str, ...] = ()
    """Programs that are not installed in this world."""


@dataclass(frozen=True)
class Case:
    """One check: evidence that fires it, evidence that does not, and a world for each."""

    code: str
    fires: object
    quiet: object
    true: World
    false: World
    severity: str
    says: str = ""
    """Words the finding or its evidence must hold."""


def says(text, status=0):
    """A tool that prints one text whatever it is asked."""
    return f"cat <<'TEXT'\n{text}\nTEXT\nexit {status}\n"


def answers(*pairs, otherwise=""):
    """A tool that answers by its arguments: (part of the arguments, text)."""
    lines = ['case "$*" in']
    for part, text in pairs:
        lines.append(f"  *'{part}'*) cat <<'TEXT'\n{text}\nTEXT\n  ;;")
    lines.append(f"  *) {otherwise or 'echo unexpected: $* >&2; exit 9'} ;;\nesac")
    return "\n".join(lines) + "\n"


def smi(*pairs):
    return World({"nvidia-smi": answers(*pairs)})


def run(command, world, directory):
    """Run a verify command in a world; returns the status and what it printed."""
    tools = directory / "bin"
    tools.mkdir(parents=True)
    for name, script in world.tools.items():
        path = tools / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
    for name in world.absent:
        (tools / name).write_text("#!/bin/sh\nexit 127\n")
        (tools / name).chmod(0o755)
    roots = set()
    for name, content in world.files.items():
        path = directory / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        roots.add("/" + name.split("/")[1] + "/")
    for root in sorted(roots):
        command = command.replace(root, f"{directory}{root}")
    done = subprocess.run(
        ["sh", "-c", f"{world.before}\n{command}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "LC_ALL": "C"},
        cwd=directory,
    )
    return done.returncode, done.stdout + done.stderr
