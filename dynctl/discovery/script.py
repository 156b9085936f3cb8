"""All probes of a host as one shell script, and its output cut back into one result per probe.

The script runs the probes at once, each in the background under its own limit, writes what they print to a private
directory and prints it all at the end between marks nobody can guess. A probe that cannot even be killed (a process
in the driver, state D) is left behind; the others are not kept waiting.
Not here: running it (`discover`), any probe.
Pure.
"""

import re
from collections.abc import Mapping

from dynctl.core.command import Command, Completed
from dynctl.core.machine import Clock
from dynctl.discovery.probe import TIMEOUT_STATUS, Probe
from dynctl.errors import ProbeError

PROBE_LIMIT_S = 10
"""How long one probe may take."""
SCRIPT_LIMIT_S = PROBE_LIMIT_S + 8
"""How long the whole round trip may take."""
MAX_OUT_BYTES = 2 * 1024**2
MAX_ERR_BYTES = 64 * 1024

_PROLOGUE = r"""
umask 077
export LC_ALL=C
begun=$(date +%s.%N)
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin
dir=
for base in /dev/shm "${TMPDIR:-/tmp}" "/run/user/$(id -u)" "$HOME"; do
  dir=$(mktemp -d "$base/dynctl-probe.XXXXXXXX" 2>/dev/null) && echo ok >"$dir/test" 2>/dev/null && [ -s "$dir/test" ] && break
  [ -n "$dir" ] && rm -rf "$dir"; dir=
done
[ -n "$dir" ] || { echo 'no directory can be written: /dev/shm, /tmp and the home directory are full or read-only' >&2; exit 73; }
trap 'rm -rf "$dir"' EXIT
trap 'exit 129' HUP INT TERM PIPE
limited() {
  if command -v timeout >/dev/null 2>&1; then timeout -k 1 LIMIT sh -c "$1"; return; fi
  sh -c "$1" & child=$!
  ( i=0; while [ $i -lt LIMIT ]; do sleep 1; kill -0 $child 2>/dev/null || exit; i=$((i+1)); done; kill -9 $child ) >/dev/null 2>&1 &
  wait $child; status=$?
  [ $status -eq 137 ] && status=124
  return $status
}
probe() {
  ( limited "$2" >"$dir/$1.out" 2>"$dir/$1.err" </dev/null; echo $? >"$dir/$1.rc" ) </dev/null >/dev/null 2>&1 &
}
absent() { echo 127 >"$dir/$1.rc"; }
"""
_EPILOGUE = r"""
waited=0
while [ $waited -lt LIMIT0 ]; do
  missing=
  for name in $names; do [ -s "$dir/$name.rc" ] || missing=1; done
  [ -z "$missing" ] && break
  if sleep 0.1 2>/dev/null; then waited=$((waited+1)); else sleep 1; waited=$((waited+10)); fi
done
for name in $names; do
  status=124
  [ -s "$dir/$name.rc" ] && read -r status <"$dir/$name.rc"
  printf '\n%s out %s %s\n' "$mark" "$name" "$status"
  [ -s "$dir/$name.out" ] && head -c MAXOUT "$dir/$name.out"
  printf '\n%s err %s\n' "$mark" "$name"
  [ -s "$dir/$name.err" ] && head -c MAXERR "$dir/$name.err"
done
printf '\n%s clock %s %s\n' "$mark" "$begun" "$(date +%s.%N)"
printf '\n%s end\n' "$mark"
"""


def build(probes: Mapping[str, Probe], mark: str, env: Mapping[str, str]) -> Command:
    """Make the command that runs all probes; `mark` is random hex, new for every host and call."""
    text = script_text(probes, mark)
    return Command(("sh", "-s"), tuple(env.items()), text.encode(), timeout_s=SCRIPT_LIMIT_S)


def script_text(probes: Mapping[str, Probe], mark: str) -> str:
    """The script itself; probes without one are for captures only."""
    assert re.fullmatch(r"[0-9a-f]{16,}", mark)
    live = {name: probe for name, probe in probes.items() if probe.script}
    epilogue = (
        _EPILOGUE.replace("LIMIT0", str((PROBE_LIMIT_S + 2) * 10))
        .replace("MAXOUT", str(MAX_OUT_BYTES))
        .replace("MAXERR", str(MAX_ERR_BYTES))
    )
    calls = [_call(name, probe) for name, probe in live.items()]
    return "\n".join(
        [
            f"mark={mark}\nnames='{' '.join(live)}'",
            _PROLOGUE.replace("LIMIT", str(PROBE_LIMIT_S)),
            *calls,
            epilogue,
        ]
    )


def _call(name: str, probe: Probe) -> str:
    start = f"probe {name} {quote(probe.script)}"
    if not probe.needs:
        return start
    return f"if {{ {probe.needs}; }} >/dev/null 2>&1; then {start}; else absent {name}; fi"


def quote(script: str) -> str:
    """Make one word of a POSIX shell out of any text."""
    return "'" + script.replace("'", "'\\''") + "'"


def split(done: Completed, mark: str) -> dict[str, Completed]:
    """Cut the output into one result per probe.

    What a login shell printed before is the part `login`, the host's clock at begin and end the part `clock`.

    Raises:
        ProbeError: when the script ended before its last mark.
    """
    at = mark.encode()
    pieces = done.stdout.split(b"\n" + at + b" ")
    if len(pieces) < 2 or not pieces[-1].startswith(b"end"):
        said = (done.stderr or done.stdout)[-300:].decode("utf-8", "replace")
        raise ProbeError(
            f"the probe script ended early (status {done.exit_status}): {said.strip() or 'no output'}"
        )
    found = {"login": Completed(done.command, 0, pieces[0], b"")}
    for piece in pieces[1:-1]:
        head, _, body = piece.partition(b"\n")
        words = head.decode("ascii", "replace").split()
        if len(words) == 3 and words[0] == "out":
            status = int(words[2]) if re.fullmatch(r"\d{1,3}", words[2]) else TIMEOUT_STATUS
            found[words[1]] = Completed(done.command, status, body, b"")
        elif len(words) == 2 and words[0] == "err" and words[1] in found:
            before = found[words[1]]
            found[words[1]] = Completed(done.command, before.exit_status, before.stdout, body)
        elif len(words) == 3 and words[0] == "clock":
            found["clock"] = Completed(done.command, 0, b" ".join(head.split()[1:]), b"")
    return found


def clock_of(part: Completed | None, sent_unix_s: float, received_unix_s: float) -> Clock | None:
    """How far a host's clock is from ours: it began after we sent, and ended before we received.

    None when the host has no clock that can be read.
    """
    words = part.stdout.decode("ascii", "replace").split() if part else []
    if len(words) != 2 or not all(re.fullmatch(r"\d{1,12}(?:\.\w{1,9})?", word) for word in words):
        return None
    # `date` without %N leaves the letter: whole seconds, which were up to one more.
    is_coarse = not all(re.fullmatch(r"\d+\.\d+", word) for word in words)
    begun, ended = (float(word.split(".")[0] if is_coarse else word) for word in words)
    most = begun - sent_unix_s + (1 if is_coarse else 0)
    least = ended - received_unix_s
    return Clock((most + least) / 2, abs(most - least) / 2)
