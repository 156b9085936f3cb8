"""Looks at hosts closely, one round trip each: what listens, what is left over, how they are set up.

Not here: hardware (`discover`), what is wrong (`checks`). IO: hosts, through a Fleet.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dynctl import registry
from dynctl.core.audit import (
    Certificate,
    HostAudit,
    KeptFile,
    KernelSettings,
    Listener,
    ModelFiles,
    NixlLoad,
    Reach,
    TaggedProcess,
)
from dynctl.core.command import Completed
from dynctl.core.inventory import HostEntry
from dynctl.discovery.discover import Fan
from dynctl.discovery.probe import TIMEOUT_STATUS, Probe
from dynctl.discovery.script import PROBE_LIMIT_S, SCRIPT_LIMIT_S, build, split
from dynctl.errors import DynctlError, ProbeError
from dynctl.remote.port import Remote

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AuditWish:
    """What to look for on one host."""

    root: str
    """The cluster's directory on that host."""
    python: str | None = None
    models: tuple[str, ...] = ()
    """Model and tokenizer directories."""
    engine_pythons: tuple[str, ...] = ()
    """Interpreters of engines, as the inventory names them."""
    reaches: tuple[Reach, ...] = ()
    """Connections to try; their outcomes are not read."""


async def audit(fleet: Fan, wishes: Mapping[str, AuditWish]) -> dict[str, HostAudit | DynctlError]:
    """Look at hosts; one that fails is there as its error, one question that fails is in its `failures`."""
    probes: dict[str, Probe] = registry.load_all("dynctl.discovery.audits", "PROBE")

    async def look(entry: HostEntry, remote: Remote) -> HostAudit:
        mark = secrets.token_hex(16)
        done = await remote.run(build(probes, mark, _environment(wishes[entry.name])))
        return read(probes, split(done, mark))

    return await fleet.map(look, list(wishes), timeout_s=SCRIPT_LIMIT_S + 20)


def read(probes: Mapping[str, Probe], parts: Mapping[str, Completed]) -> HostAudit:
    """Parse the answers of one host."""
    facts: dict[str, Any] = {}
    failures: list[tuple[str, str]] = []
    for name, probe in probes.items():
        part = parts.get(name)
        if part is None:
            failures.append((name, "no answer"))
            continue
        try:
            facts[name] = probe.parse(part)
        except ProbeError as error:
            failures.append((name, error.message))
            continue
        if part.exit_status == TIMEOUT_STATUS:
            failures.append((name, f"stopped at its limit of {PROBE_LIMIT_S} s"))
    kernel = facts.get("kernel")
    return HostAudit(
        listeners=_all(facts, "listeners", Listener),
        tagged=_all(facts, "tagged", TaggedProcess),
        kernel=kernel if isinstance(kernel, KernelSettings) else None,
        files=_all(facts, "files", KeptFile),
        certificates=_all(facts, "certificates", Certificate),
        models=_all(facts, "models", ModelFiles),
        reaches=_all(facts, "reach", Reach),
        nixl=_all(facts, "nixl", NixlLoad),
        failures=tuple(failures),
    )


def _all(facts: Mapping[str, Any], name: str, kind: type[T]) -> tuple[T, ...]:
    fact: Sequence[Any] = facts.get(name, ())
    return tuple(each for each in fact if isinstance(each, kind))


def _environment(wish: AuditWish) -> dict[str, str]:
    """Data reaches the scripts as variables, never as part of them."""
    wanted = {
        "DYNCTL_ROOT": wish.root,
        "DYNCTL_PYTHON": wish.python,
        "DYNCTL_ENGINE_PYTHONS": "\n".join(wish.engine_pythons),
        "DYNCTL_MODELS": "\n".join(path for path in wish.models if "\n" not in path),
        "DYNCTL_REACH": "\n".join(
            "\t".join((r.target, r.host_name, r.address, str(r.port))) for r in wish.reaches
        ),
    }
    return {name: value for name, value in wanted.items() if value}
