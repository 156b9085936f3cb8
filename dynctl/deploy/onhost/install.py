"""Unpack a bundle beside the others and switch to it by one rename; nothing half-made stays behind.

Runs on the host, standard library only. IO: files.
"""

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path, PurePosixPath

KEEP = 3
"""Bundles kept besides those in use, so that going back needs no copy."""


def unpack(archive: Path, directory: Path) -> None:
    """Write an archive's files below a directory: plain files with plain names, and nothing else.

    Checked here, because `tarfile`'s own filters came with Python 3.11.4 and Debian 12 has 3.11.2.

    Raises:
        ValueError: when a member is anything else; nothing outside the directory is touched.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if not member.isfile() or name.is_absolute() or ".." in name.parts:
                raise ValueError(f"unsafe member {member.name!r}")
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)


def in_use(bundles: Path) -> set[str]:
    """Names of bundles whose code runs here: an engine started long ago still imports from its own."""
    prefix = f"PYTHONPATH={bundles}/".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {os.fsdecode(v.removeprefix(prefix)) for v in variables if v.startswith(prefix)}
    return found


def main() -> None:
    """Unpack ROOT/incoming/DIGEST.tar.gz into ROOT/bundles/DIGEST."""
    wish = json.loads(sys.argv[1])
    root, digest = Path(wish["root"]), wish["digest"]
    archive = root / "incoming" / f"{digest}.tar.gz"
    bundles = root / "bundles"
    bundles.mkdir(parents=True, exist_ok=True)
    final, partial = bundles / digest, bundles / f".{digest}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        unpack(archive, partial)
        if not final.exists():
            partial.rename(final)
    except (OSError, ValueError, tarfile.TarError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        print(
            json.dumps(
                {"error": f"cannot unpack the bundle: {getattr(error, 'strerror', None) or error}"}
            )
        )
        return
    finally:
        archive.unlink(missing_ok=True)
    os.utime(final)
    others = sorted(
        (p for p in bundles.iterdir() if p != final), key=lambda p: p.stat().st_mtime, reverse=True
    )
    running = in_use(bundles)
    for old in others[KEEP - 1 :]:
        if old.name not in running:
            shutil.rmtree(old, ignore_errors=True)
    print(json.dumps({"installed": str(final)}))


if __name__ == "__main__":
    main()
