"""Tell what dynctl left on this host: bundles, the files asked for, how the agent was last started.

Runs on the host, standard library only. IO: files.
"""

import hashlib
import json
import sys
from pathlib import Path


def digest(path: Path) -> str:
    """Name a file by its content; empty when there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def expand(name: str) -> str:
    """Replace a leading `~/` as the operator's side does; no other user's home."""
    return f"{Path.home()}/{name[2:]}" if name.startswith("~/") else name


def main() -> None:
    """Print the facts as one JSON object."""
    wish = json.loads(sys.argv[1])
    root = Path(wish["root"])
    bundles = root / "bundles"
    launch = root / "launch.json"
    facts = {
        "bundles": sorted(p.name for p in bundles.iterdir() if not p.name.startswith("."))
        if bundles.is_dir()
        else [],
        "files": {name: digest(root / expand(name)) for name in wish["files"]},
        "launch": json.loads(launch.read_text()) if launch.exists() else {},
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
