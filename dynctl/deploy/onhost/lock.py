"""The cluster's lock: one directory on one host, renewed by its holder, counted by a fencing number.

A holder that stops renewing loses the lock after TTL_S by this host's own clock; agents refuse what it sends later.
Runs on the host, standard library only. IO: files.
"""

import json
import os
import sys
import time
from pathlib import Path

TTL_S = 60.0
MARKER = ".dynctl-root"
"""Says that a directory is dynctl's, so that `down` removes it."""


def look(lock: Path) -> dict[str, object]:
    """Tell who holds the lock; nothing when nobody does, or nobody renewed it for TTL_S."""
    holder = lock / "holder.json"
    try:
        try:
            age_s = time.time() - holder.stat().st_mtime
            who = json.loads(holder.read_text())
        except (OSError, ValueError):
            age_s, who = time.time() - lock.stat().st_mtime, {}
    except OSError:
        return {}  # there is none, or it was just given back
    return {"held_by": who, "age_s": age_s} if age_s < TTL_S else {}


def take(lock: Path, owner: dict[str, str]) -> dict[str, object]:
    """Take the lock, or tell who has it. A lock nobody renewed for TTL_S is broken and taken."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    if not any(lock.parent.iterdir()):
        (lock.parent / MARKER).write_text("made by dynctl\n")
    for _ in range(2):
        try:
            lock.mkdir()
        except FileExistsError:
            if held := look(lock):
                return held
            stale = lock.with_name(f"lock.stale.{os.getpid()}")
            try:
                lock.rename(stale)
            except OSError:
                continue
            for part in stale.iterdir():
                part.unlink()
            stale.rmdir()
            continue
        (lock / "holder.json").write_text(json.dumps(owner))
        counter = lock.parent / "fence"
        fence = int(counter.read_text()) + 1 if counter.exists() else 1
        counter.write_text(str(fence))
        return {"fence": fence}
    return {"held_by": {}, "age_s": 0.0}


def release(lock: Path) -> None:
    """Give the lock back; a directory that was made for nothing else goes with it."""
    (lock / "holder.json").unlink()
    lock.rmdir()
    if {path.name for path in lock.parent.iterdir()} == {MARKER, "fence"}:
        for path in lock.parent.iterdir():
            path.unlink()
        lock.parent.rmdir()


def is_mine(lock: Path, token: str) -> bool:
    """Whether the lock still carries our token."""
    try:
        return bool(json.loads((lock / "holder.json").read_text())["token"] == token)
    except (OSError, ValueError, KeyError):
        return False


def main() -> None:
    """Take, renew or release."""
    wish = json.loads(sys.argv[1])
    lock = Path(wish["root"]) / "lock"
    answer: dict[str, object] = {}
    if wish["action"] == "take":
        answer = take(lock, wish["owner"])
    elif is_mine(lock, wish["owner"]["token"]):
        if wish["action"] == "renew":
            os.utime(lock / "holder.json")
        else:
            release(lock)
        answer = {"ok": True}
    else:
        answer = {"lost": True}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
