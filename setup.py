"""What `pyproject.toml` cannot say: with DYNCTL_COMPILE=1 the modules below are compiled (docs/decisions/0012-compiled-modules.md).

The same sources run either way; each compiled module stands beside its source, and where it does not fit (another Python,
another machine) the source is used. Only wheels are compiled, never a working tree: there a stale binary would hide edits.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

COMPILED = {
    "dynctl/agents/relay": "forward metrics relay",
    "dynctl/http1": "body call connection exchange gathering guard message request server server_connection sse tls_reads upstream",
    "dynctl/kv": "hashing orphans runs slower tracker",
    "dynctl/router": "admission afterwards attempts bookings choosing deadlines desk doers expected fallback flight forks handoff hits hot "
    "ledger legs loading metrics orders overlaps paths placement prefix_index prompt rates reply rooms route_keys server short_flight "
    "slow_start tally text_blocks transfer_cost units verdicts warming worker_table workers",
    "dynctl/router/api": "answers keys known_bodies requests streams",
    "dynctl/router/policies": "kv least_loaded prefix random round_robin",
    "dynctl/router/sources": "feed route",
}
"""The way of a request and of a KV event through router and relay. Not: types that msgspec builds (it makes those classes
itself), starting and stopping, what waits for sockets in coroutines."""

IN_C = ["dynctl/kv/block_table.c", "dynctl/kv/plain_batch.c", "dynctl/kv/running_hash.c"]
"""What mypyc cannot do without an object per number. Beside its source as well."""


def _extensions():
    if os.environ.get("DYNCTL_COMPILE") != "1":
        return []
    from mypyc.build import mypycify  # noqa: PLC0415 - needed for this alone

    here = Path(__file__).parent
    files = [f"{place}/{name}.py" for place, names in COMPILED.items() for name in names.split()]
    missing = [file for file in files if not (here / file).is_file()]
    if missing:
        raise SystemExit(f"setup.py: no such modules to compile: {', '.join(missing)}")
    compiled = mypycify(files, opt_level="3", debug_level="0", group_name="dynctl")
    return compiled + [
        Extension(file.removesuffix(".c").replace("/", "."), [file], extra_compile_args=["-O3"])
        for file in IN_C
    ]


setup(ext_modules=_extensions())
