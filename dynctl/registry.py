"""One-file plug-ins: a plug-in's name is its module's name, its object's name is fixed per package.

Not here: knowledge of any plug-in. IO: imports modules.
"""

import importlib
import pkgutil
from typing import Any

from dynctl.errors import DynctlError, ExitCode


def names(package: str) -> tuple[str, ...]:
    """List the plug-ins of a package in alphabetical order, importing none of them."""
    path = importlib.import_module(package).__path__
    return tuple(sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")))


def load(package: str, name: str, attribute: str) -> Any:  # noqa: ANN401 - each seam states its own Protocol
    """Import one plug-in and return its object.

    Raises:
        DynctlError: when no plug-in has that name; lists the ones there are.
    """
    known = names(package)
    if name not in known:
        kind = package.rsplit(".", 1)[-1]
        raise DynctlError(
            f"{name!r} is none of the {kind}",
            f"there are: {', '.join(known)}",
            code=ExitCode.USAGE,
        )
    return _plug_in(package, name, attribute)


def load_all(package: str, attribute: str) -> dict[str, Any]:
    """Import every plug-in of a package: for help, probes and dashboards, where all are wanted."""
    return {name: _plug_in(package, name, attribute) for name in names(package)}


def _plug_in(package: str, name: str, attribute: str) -> Any:  # noqa: ANN401 - as in `load`
    return getattr(importlib.import_module(f"{package}.{name}"), attribute)
