"""Gathers what the checks of `dynctl doctor` look at. IO: ssh, HTTP, files, the `ssh` program.

Not here: judging (`checks`), showing (`doctor`).
"""

import asyncio
import contextlib
import json
import os
import pwd
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from dynctl.agents.protocol import AgentStatus
from dynctl.checks.advisories import CLIENT_FLOORS
from dynctl.checks.evidence import CacheFinding, Evidence, LocalFile, SshDifference
from dynctl.cli.kept import read_book, read_plan
from dynctl.core.addresses import is_loopback
from dynctl.core.audit import HostAudit, Reach
from dynctl.core.command import Command
from dynctl.core.hardware import Topology
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.plan import Plan, Role
from dynctl.deploy.bundle import bundle_digest, target_of
from dynctl.deploy.places import place_of, state_dir
from dynctl.deploy.reach import NoAgentError, reach_agents
from dynctl.deploy.slices import is_reference
from dynctl.discovery.audit import AuditWish, audit
from dynctl.discovery.discover import discover
from dynctl.discovery.survey import engine_pythons
from dynctl.errors import DynctlError
from dynctl.inventory.interpolate import replace_secrets
from dynctl.remote.fleet import Fleet
from dynctl.remote.local import LocalRemote
from dynctl.remote.routes import Route, hop_of, resolve

_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")
_SSH_TIMEOUT_S = 10.0


async def gather(inventory: Inventory, names: Sequence[str], fleet: Fleet) -> Evidence:
    """Ask the hosts, their agents and this machine; hosts that do not answer are in `topology.failures`.

    Raises:
        InventoryError: when plan.yaml is there and cannot be read.
    """
    entries = inventory.entries(names)
    pythons = engine_pythons(inventory)
    topology = await discover(entries, fleet, engine_pythons=pythons)
    topology = topology.with_links(read_book(inventory))
    reached = [host.name for host in topology.hosts]
    plan = read_plan(inventory)
    roots = {
        name: place_of(inventory.host(name), inventory, fleet.remote(name).home).root
        for name in reached
    }
    wishes = {
        host.name: AuditWish(
            root=roots[host.name],
            python=host.python,
            models=_models(inventory),
            engine_pythons=pythons,
            reaches=_reaches(plan, host.name, reached),
        )
        for host in topology.hosts
    }
    audits, agents, differences = await asyncio.gather(
        audit(fleet, wishes), _ask_agents(inventory, fleet, reached), _compare_ssh(inventory, names)
    )
    return Evidence(
        inventory=inventory,
        topology=topology,
        now_unix_s=time.time(),
        plan=plan,
        audits={n: a for n, a in audits.items() if isinstance(a, HostAudit)},
        agents=agents[0],
        silent_agents=agents[1],
        cache_findings=agents[2],
        bundles=_bundles(topology),
        roots=roots,
        identities={name: fleet.remote(name).identity for name in reached},
        local_files=_local_files(inventory),
        ssh_differences=differences,
        local_packages=_packages(),
        python=sys.executable,
        state_dir=str(state_dir(inventory)),
    )


def from_captures(topology: Topology, inventory: Inventory | None) -> Evidence:
    """Evidence out of files: what agents, sockets and links would tell is not known."""
    base = inventory or Inventory("captures", ())
    known = {entry.name for entry in base.hosts}
    more = tuple(HostEntry(h.name, h.name) for h in topology.hosts if h.name not in known)
    whole = replace(base, hosts=(*base.hosts, *more))
    plan = read_plan(inventory) if inventory else None
    return Evidence(whole, topology, time.time(), plan=plan)


def unanswered(
    evidence: Evidence,
) -> list[tuple[str, str, str]]:
    """Questions that got no answer: host, question, cause. What hangs on them is unknown, not well."""
    found = [
        (host.name, "probe", warning.text)
        for host in evidence.topology.hosts
        for warning in host.warnings
        if warning.code == "probe-failed"
    ]
    for name, looked in evidence.audits.items():
        found += [(name, question, cause) for question, cause in looked.failures]
    missing = [h.name for h in evidence.topology.hosts if h.name not in evidence.audits]
    cause = "not asked" if not evidence.audits else "no answer"
    return found + [(name, "closer look", cause) for name in missing]


def _models(inventory: Inventory) -> tuple[str, ...]:
    wishes = [w for w in inventory.deployments if w.engine.kind == "vllm"]
    paths = [path for w in wishes for path in (w.model, w.tokenizer) if path]
    return tuple(dict.fromkeys(path for path in paths if path.startswith("/")))


def _reaches(plan: Plan | None, host_name: str, reached: Sequence[str]) -> tuple[Reach, ...]:
    """Connections this host will need: relays, of a router and between parts of engines; side channels, where it decodes."""
    if plan is None:
        return ()
    hosts = {host.name: host for host in plan.hosts}
    wanted: list[Reach] = []
    for deployment in plan.deployments:
        replicas = [replica for pool in deployment.pools for replica in pool.replicas]
        if deployment.router.host_name == host_name:
            for name in dict.fromkeys(r.host_name for r in replicas):
                at = hosts[name]
                wanted.append(Reach("relay", name, at.data_address, at.relay_port, ""))
        for replica in replicas:
            names = [member.host_name for member in replica.members]
            # The first is told of all others, and each of those of it.
            others = names[1:] if host_name == names[0] else names[:1] if host_name in names else []
            wanted += [
                Reach("relay", name, hosts[name].data_address, hosts[name].relay_port, "")
                for name in others
            ]
        if any(r.host_name == host_name and r.role is Role.DECODE for r in replicas):
            wanted += [
                Reach(
                    f"side channel of {r.id}",
                    r.host_name,
                    hosts[r.host_name].data_address,
                    r.side_channel_port + rank,
                    "",
                )
                for pool in deployment.pools
                for r in pool.replicas
                if r.role is Role.PREFILL and r.side_channel_port is not None
                for rank in range(pool.parallelism.dp)
            ]
    return tuple(
        reach
        for reach in dict.fromkeys(wanted)
        if reach.host_name in reached
        and reach.host_name != host_name
        and not is_loopback(reach.address)
    )


async def _ask_agents(
    inventory: Inventory, fleet: Fleet, names: Sequence[str]
) -> tuple[dict[str, AgentStatus] | None, dict[str, str], tuple[CacheFinding, ...]]:
    """Statuses by host (None when there is no agent anywhere), why the others gave none, and what routers find."""
    statuses: dict[str, AgentStatus] = {}
    silent: dict[str, str] = {}
    findings: list[CacheFinding] = []
    async with reach_agents(inventory, fleet, names) as clients:
        for name, client in clients.items():
            if isinstance(client, DynctlError):
                if isinstance(client, NoAgentError):
                    silent[name] = client.message
                continue
            try:
                statuses[name] = await client.status()
            except DynctlError as error:
                silent[name] = error.message
                continue
            for unit in statuses[name].units:
                if unit.kind == "router":
                    with contextlib.suppress(DynctlError):  # one that starts has nothing to say yet
                        told = await client.ask_router(unit.id, "/findings")
                        findings += _cache_findings(name, unit.id, told)
    return (statuses or None), silent, tuple(findings)


def _cache_findings(host_name: str, router: str, told: bytes) -> Iterator[CacheFinding]:
    for one in json.loads(told):
        yield CacheFinding(host_name, router, one["engine"], one["cause"], one["text"], one["hint"])


def _bundles(topology: Topology) -> dict[str, str]:
    found = {}
    for host in topology.hosts:
        with contextlib.suppress(DynctlError):
            found[host.name] = bundle_digest(target_of(host))
    return found


def _local_files(inventory: Inventory) -> tuple[LocalFile, ...]:
    """The operator's files that must be closed to others, as far as they are there."""
    wanted = [(Path(inventory.path), "inventory", _has_secret(inventory))]
    wanted += [(path, "secret", True) for path in _secret_files(inventory)]
    keys = {entry.key for entry in inventory.hosts if entry.key}
    if any(not entry.is_local for entry in inventory.hosts):
        keys |= {f"~/.ssh/{name}" for name in _DEFAULT_KEYS}
    wanted += [(Path(key).expanduser(), "ssh key", True) for key in sorted(keys)]
    wanted += [
        (path, "state", True) for path in sorted((state_dir(inventory) / "tls").glob("*.key"))
    ]
    found = []
    for path, kind, has_secret in wanted:
        with contextlib.suppress(OSError):
            if path.is_file():
                found.append(LocalFile(str(path), path.stat().st_mode & 0o7777, kind, has_secret))
    return tuple(found)


def _secret_files(inventory: Inventory) -> list[Path]:
    """Files that the inventory takes secrets from: `${file:PATH}` and the routers' private keys."""
    names: list[str] = []

    def note(kind: str, rest: str) -> str:
        if kind == "file":
            names.append(rest)
        return ""

    texts = [key.reference for key in inventory.api_keys]
    texts += [value for wish in inventory.deployments for _, value in wish.engine.env]
    for text in texts:
        replace_secrets(text, note)
    names += [w.router.tls_key for w in inventory.deployments if w.router.tls_key]
    base = Path(inventory.path).parent
    return [base / Path(name).expanduser() for name in dict.fromkeys(names)]


def _has_secret(inventory: Inventory) -> bool:
    """Whether a value of the inventory looks like a secret written out."""
    return any(
        value and not is_reference(value) and any(word in name.upper() for word in _SECRET_WORDS)
        for wish in inventory.deployments
        for name, value in wish.engine.env
    )


def _packages() -> dict[str, str]:
    found = {}
    for name, _, _ in CLIENT_FLOORS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


async def _compare_ssh(inventory: Inventory, names: Sequence[str]) -> tuple[SshDifference, ...]:
    """Ask OpenSSH's own client how it would connect; nothing when there is none, or no configuration is read."""
    entries = [entry for entry in inventory.entries(names) if not entry.is_local]
    if not inventory.ssh.config or not entries:
        return ()
    path, flags = _ssh_config(inventory.ssh.config)
    limit = asyncio.Semaphore(8)

    async def one(entry: HostEntry) -> list[SshDifference]:
        argv = _ssh_words(entry, flags)
        async with limit:
            try:
                route = await resolve(hop_of(entry), path)
            except DynctlError:
                return []  # the host is in the failures, with this cause
            theirs = await _ssh_settings(argv)
        return differences(entry.name, route, theirs, argv) if theirs else []

    return tuple(d for found in await asyncio.gather(*map(one, entries)) for d in found)


def _ssh_config(text: str) -> tuple[Path, list[str]]:
    """The configuration file, and the flag that makes ssh read it; none where ssh reads it anyway.

    ssh looks into the account's home directory and not at HOME; with -F it leaves out /etc/ssh/ssh_config.
    """
    path = Path(text).expanduser()
    own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh" / "config"
    return path, [] if path == own or not path.exists() else ["-F", str(path)]


def _ssh_words(entry: HostEntry, flags: Sequence[str]) -> tuple[str, ...]:
    port = ["-p", str(entry.port)] if entry.port else []
    user = ["-l", entry.user] if entry.user else []
    jump = ["-J", entry.jump] if entry.jump else []
    return ("ssh", *flags, *port, *user, *jump, "-G", "--", entry.address)


async def _ssh_settings(argv: Sequence[str]) -> dict[str, list[str]]:
    """What `ssh -G` prints: keyword to values; empty when it cannot be asked."""
    try:
        done = await LocalRemote().run(Command(tuple(argv), timeout_s=_SSH_TIMEOUT_S))
    except DynctlError:
        return {}
    found: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "replace").splitlines() if done.is_ok else ():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword.lower(), []).append(value.strip())
    return found


def differences(
    host_name: str, route: Route, theirs: Mapping[str, Sequence[str]], argv: Sequence[str]
) -> list[SshDifference]:
    """Compare what both would use; keywords ssh does not print are left alone."""
    jump = route.jump
    ours = {"hostname": route.host, "port": str(route.port), "user": route.user}
    ours["proxyjump"] = "" if jump is None else _jump_text(jump.user, jump.address, jump.port)
    found = []
    for keyword, value in ours.items():
        said = next(iter(theirs.get(keyword, ())), "")
        if keyword == "proxyjump" and said == "none":
            said = ""
        if keyword != "proxyjump" and keyword not in theirs:
            continue
        if value.lower() != said.rpartition(",")[2].lower():
            found.append(SshDifference(host_name, keyword, value, said, tuple(argv)))
    wanted = [str(Path(name).expanduser()) for name in route.identity_files]
    files = [_key_path(name, route) for name in theirs.get("identityfile", ())]
    if wanted and not set(wanted) <= set(files):
        found.append(
            SshDifference(host_name, "identityfile", wanted[0], ", ".join(files), tuple(argv))
        )
    return found


def _key_path(text: str, route: Route) -> str:
    """A key's path as `ssh -G` prints it: its tokens are not replaced there (ssh_config(5), TOKENS)."""
    tokens = {
        "%%": "%",
        "%d": str(Path.home()),
        "%h": route.host,
        "%n": route.hop.address,
        "%p": str(route.port),
        "%r": route.user,
        "%u": pwd.getpwuid(os.getuid()).pw_name,
    }
    whole = re.sub("%.", lambda match: tokens.get(match[0], match[0]), text)
    return str(Path(whole).expanduser())


def _jump_text(user: str | None, address: str, port: int | None) -> str:
    return (f"{user}@" if user else "") + address + (f":{port}" if port and port != 22 else "")
