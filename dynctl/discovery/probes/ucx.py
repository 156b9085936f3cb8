"""Version of the host's own UCX, by `ucx_info -v`. Engines mostly bring another (see `engines`). Pure."""

import re

from dynctl.core.command import Completed
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, text_of

_SCRIPT = "ucx_info -v"
_VERSION = re.compile(r"(?m)^# (?:Library|UCT) version[:=]\s*(\d{1,3}(?:\.\d{1,3}){1,2})")


def parse(done: Completed) -> str | None:
    """Read the version of the library.

    Raises:
        ProbeError: when the tool prints none.
    """
    if done.exit_status == ABSENT_STATUS:
        return None
    text = text_of(done)
    version = _VERSION.search(text[:65536])
    if version is None:
        said = text.strip() or done.stderr.decode("utf-8", "replace")
        raise fail("ucx_info", 1, said[:200], "no version")
    return version[1]


PROBE = Probe(_SCRIPT, parse, needs="command -v ucx_info", marks=_VERSION)
