"""TCP connections from a host to ports of other hosts that requests and KV blocks need.

Tried with the host's Python, else with bash. What is connected to is told nothing.
Pure.
"""

import re

from dynctl.core.audit import Reach
from dynctl.core.command import Completed
from dynctl.core.text import clean
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
[ -n "$DYNCTL_REACH" ] || exit 0
if [ -n "$DYNCTL_PYTHON" ] && [ -x "$DYNCTL_PYTHON" ]; then
  exec "$DYNCTL_PYTHON" -I -c '
import errno, os, socket, threading
def attempt(line):
    address, port = line.split("\t")[2:4]
    try:
        socket.create_connection((address, int(port)), 3).close()
        outcome, detail = "open", ""
    except OSError as error:
        number = error.errno
        outcome = "refused" if number == errno.ECONNREFUSED else "timeout" if isinstance(error, TimeoutError) else "unreachable"
        detail = str(error)
    print("\t".join((line, outcome, detail)), flush=True)
threads = [threading.Thread(target=attempt, args=(line,)) for line in os.environ["DYNCTL_REACH"].splitlines() if line]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
'
fi
printf '%s\n' "$DYNCTL_REACH" | while IFS='	' read -r what host address port; do
  outcome=untried detail='neither Python nor bash'
  if command -v bash >/dev/null 2>&1; then
    detail=$(timeout 3 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$address" "$port" 2>&1); status=$?
    outcome=unreachable
    [ $status -eq 0 ] && outcome=open
    [ $status -eq 124 ] && outcome=timeout
    case $detail in *refused*) outcome=refused ;; esac
  fi
  printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$what" "$host" "$address" "$port" "$outcome" "$(printf '%s' "$detail" | tr '\n\t' '  ')"
done
exit 0
"""
_OUTCOMES = ("open", "refused", "timeout", "unreachable", "untried")


def parse(done: Completed) -> tuple[Reach, ...]:
    """Read what came of each connection, by host and port.

    Raises:
        ProbeError: when a line is no outcome.
    """
    found = []
    for number, line in enumerate(text_of(done).split("\n"), 1):
        if not line.strip():
            continue
        cells = line[:2048].split("\t")
        if len(cells) != 6 or cells[4] not in _OUTCOMES or not re.fullmatch(r"\d{1,5}", cells[3]):
            raise fail("connection test", number, line, "no outcome")
        what, host, address, port, outcome, detail = cells
        found.append(Reach(what, host, address, int(port), outcome, clean(detail, 200)))
    return tuple(sorted(found, key=lambda r: (r.host_name, r.port)))


PROBE = Probe(_SCRIPT, parse)
