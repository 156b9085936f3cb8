"""The machine: identity, CPUs and memory within its control group, disk, libc, Pythons, systemd, addresses.

Control group files: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max, memory.max), and version 1.
Pure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from dynctl.core.command import Completed
from dynctl.core.units import whole
from dynctl.discovery.facts import NetFacts, PythonFacts, SystemFacts
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
put() { printf '%s\t%s\n' "$1" "$2"; }
first() { { read -r line <"$1"; } 2>/dev/null && put "$2" "$line"; }
set -- $(uname -snrm)
put host_name "$2"
put kernel "$1 $3"
put arch "$4"
uid=$(id -u) user=$(id -un 2>/dev/null)
put uid "$uid"
put user "$user"
first /etc/machine-id machine_id
first /proc/sys/kernel/random/boot_id boot_id
put cpus_nominal "$(getconf _NPROCESSORS_ONLN 2>/dev/null || grep -c ^processor /proc/cpuinfo)"
put cpus_allowed "$(nproc 2>/dev/null)"
while read -r key value unit; do
  [ "$key" = MemTotal: ] && { put memory_kib "$value"; break; }
done </proc/meminfo
group=$(while IFS=: read -r _ names path; do [ -z "$names" ] && { echo "$path"; break; }; done </proc/self/cgroup)
at=/sys/fs/cgroup$group
while [ "${at#/sys/fs/cgroup}" != "$at" ]; do
  first "$at/cpu.max" cpu_max
  first "$at/memory.max" memory_max
  [ "$at" = /sys/fs/cgroup ] && break
  at=${at%/*}
done
first /sys/fs/cgroup/cpu/cpu.cfs_quota_us cpu_quota
first /sys/fs/cgroup/cpu/cpu.cfs_period_us cpu_period
first /sys/fs/cgroup/memory/memory.limit_in_bytes memory_max
dir=${DYNCTL_ROOT:-$HOME}
case $dir in '~/'*) dir=$HOME/${dir#??} ;; esac
while [ -n "$dir" ] && [ ! -d "$dir" ]; do case $dir in */*) dir=${dir%/*} ;; *) dir=. ;; esac; done
put disk "$(df -Pk "${dir:-/}" 2>/dev/null | tail -n 1)"
libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc=$(ldd --version 2>&1 | head -n 2 | tr '\n' ' ')
put libc "$libc"
seen= usable=
# The first one that dynctl can use ends the search: starting interpreters is most of what this script costs.
python() {
  [ -n "$usable" ] && return
  case $1 in */*) [ -x "$1" ] || return ;; *) command -v "$1" >/dev/null 2>&1 || return ;; esac
  facts=$("$1" -IS -c 'import os,sys; print(os.path.realpath(sys.executable), sys.executable, ".".join(map(str, sys.version_info[:3])), sys.implementation.name, sep="\t"); sys.exit(0 if sys.version_info >= (3, 11) and sys.implementation.name == "cpython" else 3)' 2>/dev/null)
  case $? in 0) usable=1 ;; 3) ;; *) return ;; esac
  real=${facts%%	*}
  case $seen in *"|$real|"*) return ;; esac
  seen="$seen|$real|"
  put python "${facts#*	}"
}
[ -n "$DYNCTL_PYTHON" ] && case $DYNCTL_PYTHON in '~/'*) python "$HOME/${DYNCTL_PYTHON#??}" ;; *) python "$DYNCTL_PYTHON" ;; esac
for name in python3 python3.13 python3.12 python3.11 python3.14; do python $name; done
for path in /usr/local/bin/python3 /usr/bin/python3 /opt/python*/bin/python3 "$HOME"/.local/bin/python3.1? /opt/conda/bin/python3; do python "$path"; done
[ -d /run/systemd/system ] && put systemd 1
run=${XDG_RUNTIME_DIR:-/run/user/$uid}
[ -d /run/systemd/system ] && XDG_RUNTIME_DIR=$run systemctl --user show -p Version >/dev/null 2>&1 && put systemd_user 1
[ -e "/var/lib/systemd/linger/$user" ] && put linger 1
put ssh "$SSH_CONNECTION"
for net in /sys/class/net/*; do
  name=${net##*/}
  [ -e "$net/operstate" ] || continue
  state= speed= mtu= node= physical=0
  { read -r state <"$net/operstate"; read -r speed <"$net/speed"; read -r mtu <"$net/mtu"; } 2>/dev/null
  [ -r "$net/mtu" ] && read -r mtu <"$net/mtu"
  [ -e "$net/device" ] && { physical=1; read -r node <"$net/device/numa_node"; } 2>/dev/null
  [ -d "$net/bonding" ] && physical=1
  put net "$name	$state	$speed	$mtu	$node	$physical"
done
ip -o addr show scope global 2>/dev/null | while read -r _ name family address _; do
  put address "$name	${address%%/*}"
done
exit 0
"""
_MAX_MEMORY = 1 << 60
"""Version 1 control groups say `no limit` with a number near 2^63."""


def parse(done: Completed) -> SystemFacts:
    """Read the tab-separated facts; what is missing stays unknown.

    Raises:
        ProbeError: when there is no fact at all, or a number is none.
    """
    rows = list(_rows(text_of(done)))
    if not rows:
        raise fail("system probe", 1, text_of(done)[:200], "no facts")
    one = {key: (number, values) for number, key, values in reversed(rows)}
    every: dict[str, list[tuple[int, list[str]]]] = {}
    for number, key, values in rows:
        every.setdefault(key, []).append((number, values))
    nominal = _integer(one, "cpus_nominal") or 1
    memory = (_integer(one, "memory_kib") or 0) * 1024
    ssh = _text(one, "ssh").split()
    return SystemFacts(
        host_name=_text(one, "host_name"),
        machine_id=_text(one, "machine_id"),
        boot_id=_text(one, "boot_id"),
        kernel=_text(one, "kernel"),
        arch=_text(one, "arch"),
        uid=-1 if (uid := _integer(one, "uid")) is None else uid,
        user=_text(one, "user"),
        num_cpus=_effective_cpus(nominal, one, every),
        num_cpus_nominal=nominal,
        memory_bytes=_effective_memory(memory, every),
        memory_nominal_bytes=memory,
        disk_free_bytes=_disk_free(_text(one, "disk")),
        libc=_libc(_text(one, "libc")),
        pythons=tuple(_pythons(every.get("python", []))),
        has_systemd="systemd" in one,
        has_systemd_user="systemd_user" in one,
        has_linger="linger" in one,
        ssh_address=ssh[2] if len(ssh) == 4 else None,
        nets=_nets(every),
    )


_Rows = Mapping[str, Sequence[tuple[int, list[str]]]]
_One = Mapping[str, tuple[int, list[str]]]


def _rows(text: str) -> Iterator[tuple[int, str, list[str]]]:
    for number, line in enumerate(text.split("\n"), 1):
        key, tab, rest = line[:8192].partition("\t")
        if tab and re.fullmatch(r"[a-z_]{2,20}", key):
            yield number, key, rest.split("\t")


def _text(one: _One, key: str) -> str:
    return one[key][1][0].strip()[:1024] if key in one else ""


def _integer(one: _One, key: str) -> int | None:
    text = _text(one, key)
    if not text:
        return None
    if not re.fullmatch(r"\d{1,15}", text):
        raise fail("system probe", one[key][0], f"{key} {text}", "not a number")
    return int(text)


def _effective_cpus(nominal: int, one: _One, every: _Rows) -> int:
    """The smallest of: CPUs online, CPUs in the affinity mask, quotas of this control group and those above it."""
    limits: list[float] = [nominal, _integer(one, "cpus_allowed") or nominal]
    told = [values[0].partition(" ")[::2] for _, values in every.get("cpu_max", [])]
    told.append((_text(one, "cpu_quota"), _text(one, "cpu_period")))
    for quota_text, period_text in told:
        quota, period = whole(quota_text), whole(period_text.strip())
        if quota is not None and period:
            limits.append(quota / period)
    return max(1, int(min(limits)))


def _effective_memory(nominal: int, every: _Rows) -> int:
    limits = [nominal] if nominal else []
    for _, values in every.get("memory_max", []):
        limit = whole(values[0].strip())
        if limit is not None and 0 < limit < _MAX_MEMORY:
            limits.append(limit)
    return min(limits, default=0)


def _disk_free(line: str) -> int | None:
    """The fourth column from the left of `df -Pk`, counted from the percentage since names may hold blanks."""
    match = re.search(r"\s(\d{1,15})\s+\d{1,3}%", line)
    return int(match[1]) * 1024 if match else None


def _libc(text: str) -> str:
    if match := re.search(r"glibc[ -](\d+\.\d+)", text):
        return f"glibc-{match[1]}"
    if "musl" in text:
        match = re.search(r"[Vv]ersion (\d+\.\d+(?:\.\d+)?)", text)
        return f"musl-{match[1]}" if match else "musl"
    return ""


def _pythons(rows: Sequence[tuple[int, list[str]]]) -> Iterator[PythonFacts]:
    for _, values in rows:
        if (
            len(values) == 3
            and values[0].startswith("/")
            and re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", values[1])
        ):
            yield PythonFacts(values[0], values[1], values[2])


def _nets(every: _Rows) -> tuple[NetFacts, ...]:
    addresses: dict[str, list[str]] = {}
    for _, values in every.get("address", []):
        if len(values) == 2 and re.fullmatch(r"[0-9a-fA-F.:]{3,45}", values[1]):
            addresses.setdefault(values[0].partition("@")[0], []).append(values[1])
    found = []
    for _, values in every.get("net", []):
        if len(values) != 6 or values[0] == "lo":
            continue
        name, state, speed, mtu, node, physical = values
        found.append(
            NetFacts(
                name=name,
                state={"up": "up", "down": "down", "lowerlayerdown": "down"}.get(state, "unknown"),
                rate_bits_s=int(speed) * 10**6 if re.fullmatch(r"[1-9]\d{0,6}", speed) else None,
                numa_node=int(node) if re.fullmatch(r"\d{1,4}", node) else None,
                mtu_bytes=int(mtu) if re.fullmatch(r"\d{1,6}", mtu) else None,
                is_physical=physical == "1",
                addresses=tuple(addresses.get(name, ())),
            )
        )
    return tuple(found)


PROBE = Probe(_SCRIPT, parse)
