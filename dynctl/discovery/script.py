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
  ( limited "$2" >"$dir/$1.out" 2>"$dir/$1.err" </dev/null; echo $? >"$dir/$1.new"; mv "$dir/$1.new" "$dir/$1.rc" ) </dev/null >/dev/null 2>&1 &
}
"""
_EPILOGUE = r"""
waited=0
while [ $waited -lt LIMIT0 ]; do
  missing=
  for name in $names; do [ -e "$dir/$name.rc" ] || missing=1; done
  [ -z "$missing" ] && break
  if sleep 0.1 2>/dev/null; then waited=$((waited+1)); else sleep 1; waited=$((waited+10)); fi
done
for name in $names; do
  status=124
  [ -e "$dir/$name.rc" ] && read -r status <"$dir/$name.rc"
  printf '\n%s out %s %s\n' "$mark" "$name" "$status"
  head -c MAXOUT "$dir/$name.out" 2>/dev/null
  printf '\n%s err %s\n' "$mark" "$name"
  head -c MAXERR "$dir/$name.err" 2>/dev/null
done
printf '\n%s end\n' "$mark"
"""


def build(probes: Mapping[str, Probe], mark: str, env: Mapping[str, str]) -> Command:
    """Make the command that runs all probes; `mark` is random hex, new for every host and call."""
    assert re.fullmatch(r"[0-9a-f]{16,}", mark)
    names = " ".join(probes)
    epilogue = (
        _EPILOGUE.replace("LIMIT0", str((PROBE_LIMIT_S + 2) * 10))
        .replace("MAXOUT", str(MAX_OUT_BYTES))
        .replace("MAXERR", str(MAX_ERR_BYTES))
    )
    calls = [f"probe {name} {_quote(probe.script)}" for name, probe in probes.items()]
    text = "\n".join(
        [
            f"mark={mark}\nnames='{names}'",
            _PROLOGUE.replace("LIMIT", str(PROBE_LIMIT_S)),
            *calls,
            epilogue,
        ]
    )
    return Command(("sh", "-s"), tuple(env.items()), text.encode(), timeout_s=SCRIPT_LIMIT_S)


def _quote(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"


def split(done: Completed, mark: str) -> dict[str, Completed]:
    """Cut the output into one result per probe; what login shells print around it is dropped.

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
    found: dict[str, Completed] = {}
    for piece in pieces[1:-1]:
        head, _, body = piece.partition(b"\n")
        words = head.decode("ascii", "replace").split()
        if len(words) == 3 and words[0] == "out":
            status = int(words[2]) if re.fullmatch(r"\d{1,3}", words[2]) else TIMEOUT_STATUS
            found[words[1]] = Completed(done.command, status, body, b"")
        elif len(words) == 2 and words[0] == "err" and words[1] in found:
            before = found[words[1]]
            found[words[1]] = Completed(done.command, before.exit_status, before.stdout, body)
    return found
