"""Fixtures for router tests; the bench itself is in `router_bench`, scripted engines in `router_fakes`."""

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

from dynctl.deploy.tls import ensure_authority, ensure_leaf

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run():
    """Run a coroutine function to its end; tasks left over and faults in callbacks fail the test."""

    def run_on_loop(main):
        async def guarded():
            faults = []
            asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
            async with asyncio.timeout(150):
                await main()
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left: {left}"
            assert not faults, faults

        asyncio.run(guarded())

    return run_on_loop


@pytest.fixture
def short_dir():
    """A folder whose paths fit a Unix socket address."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rt") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    """Certificates of a relay and a router from one cluster authority."""
    folder = tmp_path_factory.mktemp("cluster")
    authority = ensure_authority(folder / "ca")
    (folder / "ca.crt").write_bytes(authority.cert)
    for name, common_name in (("host", "relay:host-a"), ("router", "router:r0")):
        pair = ensure_leaf(folder / "ca", authority, common_name, "host-a", None)
        (folder / f"{name}.crt").write_bytes(pair.cert)
        (folder / f"{name}.key").write_bytes(pair.key)
    return folder
