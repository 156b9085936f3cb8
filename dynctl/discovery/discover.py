"""Runs all probes on all hosts, one round trip each, and puts the answers together. IO: hosts, through a Fleet."""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from dynctl import registry
from dynctl.core.command import Completed
from dynctl.core.hardware import HostFailure, Topology
from dynctl.core.inventory import HostEntry
from dynctl.core.text import clean
from dynctl.discovery.assemble import assemble
from dynctl.discovery.facts import HostFacts
from dynctl.discovery.probe import ABSENT_STATUS, TIMEOUT_STATUS, Probe, ToolError
from dynctl.discovery.script import PROBE_LIMIT_S, SCRIPT_LIMIT_S, build, clock_of, split
from dynctl.errors import DynctlError, ProbeError
from dynctl.remote.port import Remote

T = TypeVar("T")

_SAY_ABSENT = {"nvidia_smi_csv"}
"""Probes whose absent tool is itself a fact: devices on the bus without a driver."""


class Fan(Protocol):
    """What discovery needs of a Fleet: the same work on every host, a value or an error for each."""

    async def map(
        self,
        work: Callable[[HostEntry, Remote], Awaitable[T]],
        hosts: Sequence[str] | None = None,
        timeout_s: float = ...,
    ) -> dict[str, T | DynctlError]:
        """Run `work` on the named hosts, or on all."""


async def discover(
    entries: Sequence[HostEntry],
    fleet: Fan,
    own_pids: Mapping[str, frozenset[int]] | None = None,
    engine_pythons: Sequence[str] = (),
) -> Topology:
    """Describe hosts. `own_pids` names processes of ours by host, besides those that carry our tag.

    `engine_pythons` are the interpreters of engines whose packages are wanted, as the inventory names them.
    A host that fails is in `Topology.failures` with its cause; the others are complete.
    """
    probes: dict[str, Probe] = registry.load_all("dynctl.discovery.probes", "PROBE")

    async def describe(entry: HostEntry, remote: Remote) -> HostFacts:
        return await probe_host(entry, remote, probes, engine_pythons)

    answers = await fleet.map(
        describe, [entry.name for entry in entries], timeout_s=SCRIPT_LIMIT_S + 20
    )
    facts = {name: answer for name, answer in answers.items() if isinstance(answer, HostFacts)}
    failures = [
        HostFailure(
            entry.name,
            clean(answer.message, 400),
            clean(answer.hint, 400) if answer.hint else None,
            int(answer.exit_code),
        )
        for entry in entries
        if isinstance(answer := answers.get(entry.name), DynctlError)
    ]
    return assemble(entries, facts, failures, own_pids or {})


async def probe_host(
    entry: HostEntry,
    remote: Remote,
    probes: Mapping[str, Probe],
    engine_pythons: Sequence[str] = (),
) -> HostFacts:
    """Run the probes on one host and parse what they printed; a probe fails alone.

    Raises:
        ProbeError: when the script itself could not run to its end.
        DynctlError: when the host was not reached.
    """
    mark = secrets.token_hex(16)
    sent = time.time()
    done = await remote.run(build(probes, mark, environment(entry, engine_pythons)))
    received = time.time()
    try:
        parts = split(done, mark)
    except ProbeError as error:
        raise ProbeError(f"{entry.name}: {error.message}", error.hint) from error
    found = parse_parts(parts, probes)
    found.identity = getattr(remote, "identity", None)
    if clock := clock_of(parts.get("clock"), sent, received):
        found.facts["clock"] = clock
    if noise := (done.noise + parts["login"].stdout).strip():
        found.login_noise = (
            clean(noise[:4096].decode("utf-8", "replace"), 80) or "control characters"
        )
    return found


def parse_parts(parts: Mapping[str, Completed], probes: Mapping[str, Probe]) -> HostFacts:
    """Parse what the probes printed; each fails alone, with its cause."""
    found = HostFacts()
    for name, probe in probes.items():
        if not probe.script:
            continue
        if (part := parts.get(name)) is None:
            found.failures[name] = "no answer"
        elif not (probe.needs and part.exit_status == ABSENT_STATUS and name not in _SAY_ABSENT):
            parse_one(found, name, probe, part)
    return found


def parse_one(found: HostFacts, name: str, probe: Probe, part: Completed) -> None:
    """Put one probe's facts, or why there are none, into `found`."""
    try:
        found.facts[name] = probe.parse(part)
    except ProbeError as error:
        hint = f"; {error.hint}" if error.hint else ""
        found.failures[name] = clean(error.message + hint, 400)
        if isinstance(error, ToolError):
            found.kinds[name] = error.kind
        elif part.exit_status == TIMEOUT_STATUS:
            found.failures[name] = f"stopped at its limit of {PROBE_LIMIT_S} s"
            found.kinds[name] = "timeout"


def environment(entry: HostEntry, engine_pythons: Sequence[str] = ()) -> dict[str, str]:
    """What scripts need of the inventory; as variables, so that it is never part of a script."""
    wanted = {
        "DYNCTL_PYTHON": entry.python,
        "DYNCTL_ROOT": entry.root,
        "DYNCTL_ENGINE_PYTHONS": "\n".join(engine_pythons),
    }
    return {name: value for name, value in wanted.items() if value}
