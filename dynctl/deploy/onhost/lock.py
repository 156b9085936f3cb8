"""The cluster's lock on one host: a directory, renewed by its holder, counted by a fencing number.

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
        fence = 1 + last_fence(lock.parent)
        keep_fence(lock.parent, fence)
        return {"fence": fence}
    return {"held_by": {}, "age_s": 0.0}


def last_fence(root: Path) -> int:
    """Return the highest number given here: the counter's or, where an agent was sent a higher one, the agent's.

    What cannot be read counts as 0: a lock that cannot be taken any more would be worse.
    """
    try:
        counted = int((root / "fence").read_text())
    except (OSError, ValueError):
        counted = 0
    try:
        sent = json.loads((root / "slice.json").read_text())["fence"]
    except (OSError, ValueError, LookupError, TypeError):
        sent = 0
    return max(counted, sent if isinstance(sent, int) else 0)


def keep_fence(root: Path, fence: int) -> None:
    """Write the counter down, all of it or nothing."""
    new = root / "fence.new"
    new.write_text(str(fence))
    new.replace(root / "fence")


def raise_fence(lock: Path, token: str, fence: int) -> bool:
    """Let the holder count on from a higher number, which another host gave it; False: the lock is lost."""
    keep_fence(lock.parent, max(fence, last_fence(lock.parent)))
    # Who takes the lock after this look reads what was written before it.
    return is_mine(lock, token)


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
    """Take, raise, renew or release."""
    wish = json.loads(sys.argv[1])
    lock = Path(wish["root"]) / "lock"
    answer: dict[str, object] = {}
    if wish["action"] == "take":
        answer = take(lock, wish["owner"])
    elif is_mine(lock, wish["owner"]["token"]):
        is_held = True
        if wish["action"] == "renew":
            os.utime(lock / "holder.json")
        elif wish["action"] == "raise":
            is_held = raise_fence(lock, wish["owner"]["token"], wish["fence"])
        else:
            release(lock)
        answer = {"ok": True} if is_held else {"lost": True}
    else:
        answer = {"lost": True}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
