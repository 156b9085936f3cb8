"""Routes, bonds and listening TCP ports. Devices and their addresses are told by `system`. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import Route
from dynctl.discovery.facts import NetworkFacts
from dynctl.discovery.probe import Probe, text_of

_SCRIPT = r"""
ip -4 route show table main 2>/dev/null
ip -6 route show table main 2>/dev/null
for bond in /proc/net/bonding/*; do
  [ -e "$bond" ] || continue
  echo "bond ${bond##*/}"
  sed -n 's/^Slave Interface: /slave /p' "$bond"
done
grep -Hs ' 0A ' /proc/net/tcp /proc/net/tcp6
exit 0
"""
_ROUTE = re.compile(r"(?:unicast )?(default|[0-9a-fA-F.:]{2,45}(?:/\d{1,3})?) (.{0,400})")
_WORD = re.compile(r"\b(dev|via|src|metric)\s+(\S{1,64})")
_LISTEN = re.compile(
    r"/proc/net/tcp6?:\s*\d+: [0-9A-F]{8,32}:([0-9A-F]{4}) [0-9A-F]{8,32}:0000 0A "
)
_NAME = re.compile(r"[\w.@:-]{1,64}")
_MAX_ROUTES = 256


def parse(done: Completed) -> NetworkFacts:
    """Read what can be read; a host without `ip` has no routes here."""
    routes: list[Route] = []
    bonds: dict[str, list[str]] = {}
    ports: set[int] = set()
    bond = None
    for line in (raw[:600] for raw in text_of(done).split("\n")):
        kind, _, rest = line.partition(" ")
        if (match := _ROUTE.match(line)) and len(routes) < _MAX_ROUTES:
            words = dict(_WORD.findall(match[2]))
            if "dev" in words:
                metric = words.get("metric", "")
                routes.append(
                    Route(
                        match[1],
                        words["dev"],
                        words.get("via"),
                        words.get("src"),
                        int(metric) if re.fullmatch(r"\d{1,10}", metric) else None,
                    )
                )
        elif kind == "bond" and _NAME.fullmatch(rest):
            bond = rest
            bonds.setdefault(bond, [])
        elif kind == "slave" and bond and _NAME.fullmatch(rest):
            bonds[bond].append(rest)
        elif match := _LISTEN.match(line):
            ports.add(int(match[1], 16))
    return NetworkFacts(
        tuple(routes), tuple((b, tuple(m)) for b, m in bonds.items()), tuple(sorted(ports))
    )


PROBE = Probe(_SCRIPT, parse)
