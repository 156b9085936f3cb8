"""Remove dynctl's directory from this host, if it is dynctl's and nothing of it runs any more.

Runs on the host, standard library only. IO: files.
"""

import json
import os
import shutil
import sys
from pathlib import Path

MARKER = ".dynctl-root"


def users_of(root: Path) -> list[str]:
    """Processes that were started from this directory and still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        prefix = os.fsencode(root) + b"/"
        if any(word == os.fsencode(root) or word.startswith(prefix) for word in words):
            found.append(
                f"pid {entry.name} ({b' '.join(words)[:80].decode(errors='replace').strip()})"
            )
    return found


def main() -> None:
    """Remove the directory, or say why not."""
    wish = json.loads(sys.argv[1])
    root = Path(wish["root"])
    if not root.exists():
        print(json.dumps({"removed": False}))
        return
    if not (root / MARKER).exists():
        print(
            json.dumps({"error": f"{root} was not made by dynctl (it has no {MARKER}); left alone"})
        )
        return
    running = users_of(root)
    if running:
        print(json.dumps({"error": f"still running from {root}: {'; '.join(running)}"}))
        return
    socket_file = root / "agent.socket-path"
    short = Path(socket_file.read_text().strip()).parent if socket_file.exists() else root
    if root not in short.parents and short != root and short.name.startswith("dynctl-"):
        shutil.rmtree(short, ignore_errors=True)
    shutil.rmtree(root)
    parent = root.parent
    while parent.name in {".dynctl", "hosts"} and not any(parent.iterdir()):
        parent.rmdir()
        parent = parent.parent
    print(json.dumps({"removed": True}))


if __name__ == "__main__":
    main()
