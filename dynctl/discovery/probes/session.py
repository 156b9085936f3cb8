"""What a process of ours gets: locked memory, open files, shared memory, and what the SSH server allows.

An agent without systemd inherits the limits of the login session, one under systemd those of its unit; where one
runs already, its own are read. Of the two limits systemd has of each kind, the soft one counts for locked memory, which
nobody raises, and the hard one for open files, to which the agent raises its own. Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import UNLIMITED, Limits, Sshd
from dynctl.discovery.facts import SessionFacts
from dynctl.discovery.probe import Probe, fail, integer, text_of

_SCRIPT = r"""
echo "memlock $(ulimit -l)"
echo "nofile $(ulimit -n)"
echo "shm $(df -Pk /dev/shm 2>/dev/null | tail -n 1)"
if [ -d /run/systemd/system ]; then
  [ "$(id -u)" = 0 ] && whose= || whose=--user
  systemctl $whose show -p DefaultLimitMEMLOCKSoft -p DefaultLimitMEMLOCK -p DefaultLimitNOFILE 2>/dev/null
fi
dir=${DYNCTL_ROOT:-$HOME/.dynctl}
case $dir in '~/'*) dir=$HOME/${dir#??} ;; esac
for file in "$dir"/agent.pid "$dir"/*/agent.pid; do
  [ -r "$file" ] && read -r pid <"$file" && [ -n "$pid" ] && sed -n 's/^/agent /p' "/proc/$pid/limits"
done 2>/dev/null
grep -hisE '^[[:space:]]*(MaxSessions|MaxStartups|AllowTcpForwarding|AllowStreamLocalForwarding|DisableForwarding)[[:space:]]' \
  /etc/ssh/sshd_config.d/*.conf /etc/ssh/sshd_config | sed 's/^[[:space:]]*/sshd /'
exit 0
"""


def parse(done: Completed) -> SessionFacts:
    """Read the limits.

    Raises:
        ProbeError: when neither limit of the session is there.
    """
    text = text_of(done)
    rows: dict[str, str] = {}
    sshd: dict[str, str] = {}
    agent: dict[str, str] = {}
    for line in (raw[:400] for raw in text.split("\n")):
        key, _, rest = line.partition(" ")
        if key == "sshd":
            name, _, value = rest.strip().partition(" ")
            sshd.setdefault(name.lower(), value.strip().lower())
        elif key == "agent":
            if match := re.match(r"(Max locked memory|Max open files)\s+(\S+)", rest):
                agent[match[1]] = match[2]
        elif match := re.match(r"(DefaultLimit\w+)=(\S+)", line):
            rows[match[1]] = match[2]
        else:
            rows.setdefault(key, rest.strip())
    if "memlock" not in rows and "nofile" not in rows:
        raise fail("ulimit", 1, text[:200], "no limits in the output")
    memlock = _limit(rows.get("memlock"))
    disk = re.search(r"\s(\d{1,15})\s+\d{1,15}\s+(\d{1,15})\s+\d{1,3}%", rows.get("shm", ""))
    return SessionFacts(
        limits=Limits(
            memlock if memlock in {None, UNLIMITED} else (memlock or 0) * 1024,
            _limit(rows.get("nofile")),
        ),
        unit_limits=Limits(
            _limit(rows.get("DefaultLimitMEMLOCKSoft", rows.get("DefaultLimitMEMLOCK"))),
            _limit(rows.get("DefaultLimitNOFILE")),
        ),
        agent_limits=Limits(
            _limit(agent.get("Max locked memory")), _limit(agent.get("Max open files"))
        ),
        shm_bytes=int(disk[1]) * 1024 if disk else None,
        shm_free_bytes=int(disk[2]) * 1024 if disk else None,
        sshd=Sshd(
            max_sessions=integer(sshd.get("maxsessions"), 6),
            max_startups=sshd.get("maxstartups"),
            allows_forwarding=_forwarding(sshd) if sshd else None,
        ),
    )


def _limit(text: str | None) -> int | None:
    if text in {"unlimited", "infinity"}:
        return UNLIMITED
    return integer(text, 19)


def _forwarding(sshd: dict[str, str]) -> bool:
    """Whether Unix sockets may be forwarded, which is how the agent is reached."""
    allowed = sshd.get("allowstreamlocalforwarding", "yes") in {"yes", "all", "local"}
    return allowed and sshd.get("disableforwarding", "no") == "no"


PROBE = Probe(_SCRIPT, parse)
