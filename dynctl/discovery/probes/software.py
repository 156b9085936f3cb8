"""Kernel side of the software: driver module, RDMA modules, peer memory clients. Engines have a probe of their own. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import Software
from dynctl.discovery.facts import SoftwareFacts
from dynctl.discovery.probe import Probe, text_of

_SCRIPT = r"""
grep -hs . /proc/driver/nvidia/version | sed 's/^/nvidia /'
grep -hsE '^(nvidia|nvidia_uvm|nvidia_peermem|nv_peer_mem|nvidia_fs|nouveau|gdrdrv|mlx5_core|mlx5_ib|ib_uverbs|ib_core|rdma_cm|rdma_ucm|irdma|bnxt_re|efa|amdgpu|xpmem) ' /proc/modules | sed 's/^/module /'
for peer in /sys/kernel/mm/memory_peers/*; do
  [ -d "$peer" ] && echo "peer ${peer##*/}"
done
exit 0
"""
_VERSION = re.compile(r"NVRM version:.{0,200}?\s(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)\b")


def parse(done: Completed) -> SoftwareFacts:
    """Read what is loaded; a host without any of it has empty facts."""
    text = text_of(done)
    version = _VERSION.search(text)
    modules = re.findall(r"(?m)^module ([a-z0-9_]{2,32}) ", text)
    is_open = "Open Kernel Module" in text
    return SoftwareFacts(
        Software(
            module_version=version[1] if version else None,
            modules=tuple(dict.fromkeys(modules[:64])),
            memory_peers=tuple(re.findall(r"(?m)^peer ([\w.-]{1,64})$", text)[:16]),
            has_dmabuf=is_open if version else None,
        )
    )


PROBE = Probe(_SCRIPT, parse, marks=re.compile(r"(?m)^(?:nvidia )?NVRM version:"))
