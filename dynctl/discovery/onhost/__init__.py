"""Programs that probes send whole to a host: standard library only, Python 3.8 or newer. Pure."""

from functools import cache
from importlib import resources


@cache
def source(name: str) -> str:
    """The text of one of these programs."""
    return resources.files(__name__).joinpath(f"{name}.py").read_text()
