"""Programs that measure a link from both of its ends: sent whole over SSH, standard library only.

A program and its token arrive on stdin, so neither is seen in a process list; the answer is JSON lines on stdout.
They must run on Python 3.10, since NIXL lives in the engine's interpreter. Also importable, for tests.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

from dynctl.core.command import Command

# Kept in one line and without single quotes: it passes through login shells of every kind.
_BOOT = (
    "import json,sys,types;"
    "sys.path[:]=[p for p in sys.path if p];"
    "w=json.loads(sys.stdin.buffer.readline());"
    '[exec(compile(s,n,"exec"),sys.modules.setdefault(n,types.ModuleType(n)).__dict__)'
    ' for n,s in w.pop("modules")];'
    'sys.modules[w.pop("run")].main(w)'
)
_PACKAGES = ("dynctl", "dynctl.linktest", __name__)
MODULES = {
    "tcp": ("wire", "netdev", "tcp"),
    "nixl_pull": ("wire", "netdev", "ucx_log", "nixl_memory", "nixl_pull"),
    "nixl_look": ("nixl_look",),
}
"""What each program is made of, in order of import."""


def program(
    name: str,
    python: str,
    wish: Mapping[str, object],
    timeout_s: float,
    env: Sequence[tuple[str, str]] = (),
) -> Command:
    """The command that runs one of these programs; `wish` may hold a secret, it travels on stdin."""
    sent = json.dumps({**wish, "run": f"{__name__}.{name}"})
    stdin = f'{sent[:-1]}, "modules": {_modules(name)}}}\n'.encode()
    return Command((python, "-s", "-c", _BOOT), tuple(env), stdin, timeout_s)


@cache
def _modules(name: str) -> str:
    """Names and sources of a program's modules as JSON; a cluster's pairs are many."""
    here = resources.files(__name__)
    modules = [[package, ""] for package in _PACKAGES]
    modules += [[f"{__name__}.{m}", here.joinpath(f"{m}.py").read_text()] for m in MODULES[name]]
    return json.dumps(modules)
