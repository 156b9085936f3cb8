"""Version of the vendor's RDMA stack, by `ofed_info -s`; hosts that use the kernel's own have none. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, text_of

_SCRIPT = "ofed_info -s"
_VERSION = re.compile(r"(?m)^((?:MLNX_OFED|OFED|DOCA|MLNX_EN)[\w.-]{1,80}):?\s*$", re.IGNORECASE)


def parse(done: Completed) -> str | None:
    """Read `MLNX_OFED_LINUX-24.10-1.1.4.0:` or `OFED-internal-25.10-1.7.1.413:`.

    Raises:
        ProbeError: when the tool prints something else.
    """
    if done.exit_status == ABSENT_STATUS:
        return None
    text = text_of(done)
    version = _VERSION.search(text[:65536])
    if version is None:
        raise fail("ofed_info", 1, text[:200], "no version")
    return version[1]


PROBE = Probe(_SCRIPT, parse, needs="command -v ofed_info", marks=_VERSION)
