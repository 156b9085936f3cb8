"""Unpack a bundle beside the others and switch to it by one rename; nothing half-made stays behind.

Runs on the host, standard library only. IO: files.
"""

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

KEEP = 3
"""Bundles kept, so that going back needs no copy."""


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
        with tarfile.open(archive) as tar:
            tar.extractall(partial, filter="data")
        if not final.exists():
            partial.rename(final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        print(json.dumps({"error": f"cannot unpack the bundle: {error.strerror or error}"}))
        return
    finally:
        archive.unlink(missing_ok=True)
    os.utime(final)
    others = sorted(
        (p for p in bundles.iterdir() if p != final), key=lambda p: p.stat().st_mtime, reverse=True
    )
    for old in others[KEEP - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    print(json.dumps({"installed": str(final)}))


if __name__ == "__main__":
    main()
