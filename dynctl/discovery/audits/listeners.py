"""Who listens on TCP, from /proc: address, port, process, and whether it is one of ours or an engine.

Sockets of other users are listed without their process unless we are root.
Format: Documentation/networking/proc_net_tcp.rst of the Linux kernel (addresses in host byte order).
Pure.
"""

import ipaddress
import re
import sys
from collections.abc import Mapping

from dynctl.core.audit import Listener
from dynctl.core.command import Completed
from dynctl.core.text import clean
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
proc=${DYNCTL_PROC:-/proc}
sockets=$(cat "$proc/net/tcp" "$proc/net/tcp6" 2>/dev/null | awk '$4 == "0A" { print $10, $2, $8 }')
printf '%s\n' "$sockets" | sed -n 's/^\(..*\)$/listen \1/p'
inodes=$(printf '%s\n' "$sockets" | awk '{ printf "|%s", $1 } END { print "|" }')
owners=$(ls -l "$proc"/[0-9]*/fd/ 2>/dev/null | awk -v inodes="$inodes" '
  /\/fd\/?:$/ { n = split($0, part, "/"); for (i = 1; i < n; i++) if (part[i + 1] ~ /^fd/) pid = part[i] }
  / -> socket:\[/ { inode = $NF; gsub(/[^0-9]/, "", inode); if (index(inodes, "|" inode "|")) print inode, pid }' | sort -u)
printf '%s\n' "$owners" | sed -n 's/^\(..*\)$/owner \1/p'
for pid in $(printf '%s\n' "$owners" | awk 'NF { print $2 }' | sort -u); do
  command=$(tr '\0\n\t' '   ' <"$proc/$pid/cmdline" | head -c 300)
  root=$(tr '\0' '\n' <"$proc/$pid/environ" | sed -n 's/^DYNCTL_ROOT=//p' | head -n 1)
  printf 'process %s\t%s\t%s\t%s\n' "$pid" "$(stat -c %U "$proc/$pid")" "$root" "$command"
done 2>/dev/null
exit 0
"""
_LISTEN = re.compile(r"^listen (\d{1,20}) ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) (\d{1,10})$")
_OWNER = re.compile(r"^owner (\d{1,20}) (\d{1,10})$")
_PROCESS = re.compile(r"^process (\d{1,10})\t(.{0,64}?)\t(.{0,1024}?)\t(.*)$")
_ENGINE = re.compile(
    r"vllm\.entrypoints|\bvllm serve\b|VLLM::|sglang\.launch_server|trtllm-serve|tritonserver"
    r"|text-generation-launcher|lmdeploy|dynctl\.sim\b"
)


def parse(done: Completed) -> tuple[Listener, ...]:
    """Read the listeners, by port.

    Raises:
        ProbeError: when a line is none of the three kinds.
    """
    sockets: list[tuple[str, str, int, str]] = []
    owners: dict[str, str] = {}
    processes: dict[str, tuple[str, str, str]] = {}
    for number, line in enumerate(text_of(done).split("\n"), 1):
        if match := _LISTEN.match(line):
            sockets.append((match[1], _address(match[2]), int(match[3], 16), match[4]))
        elif match := _OWNER.match(line):
            owners.setdefault(match[1], match[2])
        elif match := _PROCESS.match(line[:2048]):
            processes[match[1]] = (match[2], match[3], match[4])
        elif line.strip():
            raise fail("/proc/net/tcp", number, line, "neither socket, owner nor process")
    found = {_listener(socket, owners, processes) for socket in sockets}
    return tuple(sorted(found, key=lambda at: (at.port, at.address, at.pid or 0)))


def _listener(
    socket: tuple[str, str, int, str],
    owners: Mapping[str, str],
    processes: Mapping[str, tuple[str, str, str]],
) -> Listener:
    inode, address, port, uid = socket
    pid = owners.get(inode)
    user, root, command = processes.get(pid or "", ("", "", ""))
    return Listener(
        address=address,
        port=port,
        pid=int(pid) if pid else None,
        program=clean(command, 80),
        user=clean(user, 64) or f"uid {uid}",
        root=clean(root, 400),
        is_engine=_ENGINE.search(command) is not None,
    )


def _address(text: str) -> str:
    """Four-byte groups are numbers in the host's byte order; every platform we support is little-endian like this one."""
    order = sys.byteorder
    groups = [int(text[i : i + 8], 16).to_bytes(4, order) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(groups))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


PROBE = Probe(_SCRIPT, parse)
