"""Topologies from files: the output of `dynctl discover --script`, or what single tools printed, their kind recognised.

One file of the script is one host, named in it. Captures of single tools are one host when no tool comes twice, else
one host each; a directory is one host with all its files; NAME=PATH says which host a path is of.
Not here: what any tool prints (`probes/`), reading files (`offline`).
IO: random marks only.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dynctl import registry
from dynctl.core.command import Command, Completed
from dynctl.core.hardware import Topology
from dynctl.core.inventory import HostEntry
from dynctl.core.text import clean, is_name
from dynctl.discovery.assemble import assemble
from dynctl.discovery.discover import parse_one, parse_parts
from dynctl.discovery.facts import HostFacts, SystemFacts
from dynctl.discovery.mend import mend
from dynctl.discovery.probe import Probe
from dynctl.discovery.script import quote, script_text, split
from dynctl.errors import DynctlError, ProbeError, UsageError

FIRST_LINE = re.compile(rb"(?:^|\n)dynctl-capture 1 ([0-9a-f]{16,64})\r?\n")
_NO_COMMAND = Command(("capture",))
_MAX_MARK_CHARS = 4000
"""What tells a tool's output stands near the beginning of its lines."""
_LIST_OF_HEAD = 10
"""`head` without a number prints ten lines."""


@dataclass(frozen=True, slots=True)
class Capture:
    """One file: whose it is, if that was said, and what it holds."""

    path: str
    content: bytes
    host_name: str | None = None


def probes() -> dict[str, Probe]:
    """Every probe by its name."""
    return registry.load_all("dynctl.discovery.probes", "PROBE")


def portable_script(engine_pythons: Sequence[str] = (), models: Sequence[str] = ()) -> str:
    """Make the POSIX script that describes a host where it runs; its output is what `--from` reads."""
    mark = secrets.token_hex(16)
    exports = {
        "DYNCTL_ENGINE_PYTHONS": "\n".join(engine_pythons),
        "DYNCTL_MODELS": "\n".join(models),
    }
    return "\n".join(
        [
            "#!/bin/sh",
            "# Describes this machine for dynctl: reads only, changes nothing, needs no privileges.",
            "# Usage: sh THIS >host.txt, then: dynctl discover --from host.txt",
            *(f"export {name}={quote(value)}" for name, value in exports.items() if value),
            f"echo 'dynctl-capture 1 {mark}'",
            script_text(probes(), mark),
        ]
    )


def read_captures(
    captures: Sequence[Capture], entries: Sequence[HostEntry] | None = None
) -> tuple[Topology, dict[str, HostFacts]]:
    """Put captures together; `entries` are the inventory's hosts, None when there is none. Also gives the facts.

    Raises:
        UsageError: when a file is of no known kind, or of no host of the inventory.
    """
    known = probes()
    facts: dict[str, HostFacts] = {}
    captures = [_mended(capture) for capture in captures]
    for name, files in _by_host(captures, known).items():
        host_name = _entry_name(name, files, known, entries)
        if host_name in facts:
            raise UsageError(
                f"two captures are of host {host_name}", "say which is whose: NAME=PATH"
            )
        facts[host_name] = _facts(files, known)
    if entries is None:
        entries = [HostEntry(name, name) for name in facts]
    return assemble(entries, facts, (), {}), facts


def _mended(capture: Capture) -> Capture:
    """Undo what copying did to it; what the script printed whole stays as it is."""
    if FIRST_LINE.search(capture.content):
        return capture
    return replace(capture, content=mend(capture.content).encode("utf-8", "replace"))


def _by_host(captures: Sequence[Capture], known: Mapping[str, Probe]) -> dict[str, list[Capture]]:
    """Group files by the host they are of."""
    hosts: dict[str, list[Capture]] = {}
    loose: list[Capture] = []
    for capture in captures:
        if capture.host_name is not None:
            hosts.setdefault(capture.host_name, []).append(capture)
        elif FIRST_LINE.search(capture.content):
            hosts[_free_name(_name_in(capture, known) or _stem(capture.path), hosts)] = [capture]
        else:
            loose.append(capture)
    kinds = [kind for capture in loose for kind in kinds_of(capture.content, known)]
    if len(loose) > 1 and len(kinds) > len(set(kinds)):
        for capture in loose:
            hosts[_free_name(_stem(capture.path), hosts)] = [capture]
    elif loose:
        hosts[_free_name(_stem(loose[0].path), hosts)] = loose
    return hosts


def _stem(path: str) -> str:
    """A host's name out of a file's."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rstrip("/").rpartition("/")[2])
    stem = re.sub(r"\.(?:txt|out|log|xml|csv)$", "", name).strip("-._")
    return stem if is_name(stem) else "host"


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _name_in(capture: Capture, known: Mapping[str, Probe]) -> str | None:
    system = _facts([capture], known).fact("system", SystemFacts)
    name = clean(system.host_name, 200) if system else ""
    return name if is_name(name) else None


def kinds_of(content: bytes, known: Mapping[str, Probe]) -> list[str]:
    """Names of the tools whose output a file holds."""
    lines = content.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    text = "\n".join(line[:_MAX_MARK_CHARS] for line in lines)
    return [name for name, probe in known.items() if probe.marks and probe.marks.search(text)]


def _entry_name(
    name: str,
    files: Sequence[Capture],
    known: Mapping[str, Probe],
    entries: Sequence[HostEntry] | None,
) -> str:
    """Which host of the inventory a capture is of: by its name, or by an address it has."""
    if entries is None:
        return name
    for entry in entries:
        if (
            name in {entry.name, entry.address, entry.data_address}
            or name.split(".", maxsplit=1)[0] == entry.name
        ):
            return entry.name
    system = _facts(files, known).fact("system", SystemFacts)
    own = {a for net in (system.nets if system else ()) for a in net.addresses}
    matching = [e.name for e in entries if {e.address, e.data_address} & own]
    if len(matching) == 1:
        return matching[0]
    raise UsageError(
        f"{files[0].path} is of {clean(name)}, which is no host of the inventory",
        f"say whose it is: NAME={files[0].path}, NAME one of {', '.join(e.name for e in entries[:8])}",
    )


def _facts(files: Sequence[Capture], known: Mapping[str, Probe]) -> HostFacts:
    merged = HostFacts(is_capture=True)
    for capture in files:
        one = _facts_of_file(capture, known)
        merged.facts = one.facts | merged.facts
        merged.failures |= {n: why for n, why in one.failures.items() if n not in merged.facts}
        merged.kinds |= one.kinds
        merged.notes += one.notes
    for name in merged.facts:
        merged.failures.pop(name, None)
    return merged


def _facts_of_file(capture: Capture, known: Mapping[str, Probe]) -> HostFacts:
    mark = FIRST_LINE.search(capture.content)
    if mark is not None:
        done = Completed(_NO_COMMAND, 0, capture.content.replace(b"\r\n", b"\n"), b"")
        try:
            found = parse_parts(split(done, mark[1].decode()), known)
        except ProbeError as error:
            raise DynctlError(
                f"{capture.path}: {error.message}", "run the script on the host again"
            ) from error
        found.is_capture = True
        return found
    found = HostFacts(is_capture=True)
    done = Completed(_NO_COMMAND, 0, capture.content, b"")
    kinds = kinds_of(capture.content, known)
    if not kinds:
        raise UsageError(
            f"{capture.path}: of no tool that is known",
            f"known are: {', '.join(n.replace('_', ' ') for n, p in known.items() if p.marks)}, and dynctl discover --script",
        )
    for kind in kinds:
        parse_one(found, kind, known[kind], done)
    # A title of one tool may look like another's: with facts at hand what gave none is no failure.
    if found.facts:
        found.failures = {n: why for n, why in found.failures.items() if n in found.kinds}
    lines = [line for line in capture.content.split(b"\n") if line.strip()]
    if set(found.facts) == {"nvidia_smi_list"} and len(lines) == _LIST_OF_HEAD:
        found.notes.append(
            "nvidia-smi -L: exactly ten lines, as head prints: there may be more GPUs"
        )
    return found
