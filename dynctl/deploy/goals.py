"""What each host shall look like: its slice, its bundle and the files it needs. IO: files (certificates)."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynctl.agents.protocol import HostSlice
from dynctl.core.hardware import Topology
from dynctl.core.inventory import Inventory
from dynctl.core.plan import Plan
from dynctl.deploy.bundle import Target, bundle_digest, target_of
from dynctl.deploy.observe import Seat
from dynctl.deploy.places import state_dir
from dynctl.deploy.slices import (
    TOKENIZER_FILES,
    Ground,
    is_reference,
    make_slices,
    secret_name,
    tls_names,
    tokenizer_source,
)
from dynctl.deploy.steps import HostGoal
from dynctl.deploy.tls import ensure_authority, ensure_leaf
from dynctl.errors import DeployError, ExitCode, InventoryError
from dynctl.files import reason
from dynctl.inventory.secrets import reveal
from dynctl.router.config import ApiKeyHash


@dataclass(frozen=True, slots=True)
class Copy:
    """A file that comes from another host: a model's tokenizer on its way to the router."""

    source_host: str
    source_path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Goals:
    """Everything a deploy wants, before anything was changed."""

    hosts: Mapping[str, HostGoal]
    targets: Mapping[str, Target]
    content: Mapping[str, Mapping[str, bytes]]
    """Per host: files to be written, by path below the root."""
    copies: Mapping[str, Mapping[str, Copy]]
    """Per host: files to be copied from another host, by path below the root."""


def tokenizer_paths(plan: Plan, inventory: Inventory) -> dict[str, list[str]]:
    """Tokenizer files whose digests are wanted, by the host they lie on."""
    wishes = {wish.name: wish for wish in inventory.deployments}
    paths: dict[str, list[str]] = {}
    for planned in plan.deployments:
        source = tokenizer_source(planned, wishes[planned.name])
        if source is not None:
            paths.setdefault(source, []).extend(
                f"{planned.model}/{name}" for name in TOKENIZER_FILES
            )
    return paths


def copied_paths(plan: Plan, inventory: Inventory) -> dict[str, list[str]]:
    """Paths, below the roots of routers' hosts, of the tokenizers that are copied there, by host."""
    wishes = {wish.name: wish for wish in inventory.deployments}
    paths: dict[str, list[str]] = {}
    for planned in plan.deployments:
        if tokenizer_source(planned, wishes[planned.name]) is not None:
            paths.setdefault(planned.router.host_name, []).extend(
                f"tokenizers/{planned.name}/{name}" for name in TOKENIZER_FILES
            )
    return paths


def secret_paths(inventory: Inventory) -> list[str]:
    """Paths, below a host's root, of all secrets the inventory's deployments may need there."""
    return [
        f"secrets/{secret_name(wish.name, name)}"
        for wish in inventory.deployments
        for name, value in wish.engine.env
        if is_reference(value)
    ]


def server_tls_paths(inventory: Inventory) -> list[str]:
    """Paths, below a router's root, of the certificates clients are shown."""
    return [
        f"tls/server-{wish.name}.{suffix}"
        for wish in inventory.deployments
        if wish.router.tls_cert
        for suffix in ("crt", "key")
    ]


def make_goals(
    plan: Plan,
    inventory: Inventory,
    topology: Topology,
    seats: Mapping[str, Seat],
    digests: Mapping[str, Mapping[str, str]],
) -> Goals:
    """Work out the goals of all hosts of a plan.

    `digests` holds what `observe` found for `tokenizer_paths`, by host and path.

    Raises:
        DeployError: when a host of the plan has no Python, exit 4.
        InventoryError: when a certificate for clients cannot be read.
        SecretError: when a reference leads nowhere.
    """
    names = [host.name for host in plan.hosts]
    targets = {name: target_of(topology.host(name)) for name in names}
    bundles = {name: bundle_digest(target) for name, target in targets.items()}
    places = {name: seats[name].place for name in names}
    ground = Ground(places, bundles, _api_keys(inventory), topology)
    slices = make_slices(plan, inventory, ground)
    content = {
        name: _certificates(inventory, plan, slices[name])
        | _secrets(inventory, slices[name])
        | _server_tls(inventory, slices[name])
        for name in names
    }
    copies = _copies(plan, inventory, digests)
    goals = {}
    for name in names:
        files = {path: _digest(data) for path, data in content[name].items()}
        files |= {path: copy.digest for path, copy in copies.get(name, {}).items()}
        goals[name] = HostGoal(
            slice=slices[name],
            bundle=bundles[name],
            bundle_path=seats[name].place.bundle_path(bundles[name]),
            scope=seats[name].scope,
            files=tuple(sorted(files.items())),
        )
    return Goals(goals, targets, content, copies)


def _api_keys(inventory: Inventory) -> tuple[ApiKeyHash, ...]:
    """The keys as the router gets them: hashed here, so that they never leave this machine."""
    keys = []
    for key in inventory.api_keys:
        text = reveal(key.reference, inventory, f"API key {key.name}").reveal()
        digest = hashlib.sha256(text.encode()).hexdigest()
        keys.append(ApiKeyHash(key.name, digest, key.priority, key.route_key))
    return tuple(keys)


def _secrets(inventory: Inventory, slice_: HostSlice) -> dict[str, bytes]:
    """Environment values given by reference, as files only their owner reads; slices carry the files' names."""
    wishes = {wish.name: wish for wish in inventory.deployments}
    files = {}
    for deployment in sorted({engine.deployment for engine in slice_.engines}):
        for name, value in wishes[deployment].engine.env:
            if is_reference(value):
                text = reveal(value, inventory, f"deployment {deployment}, env {name}").reveal()
                files[f"secrets/{secret_name(deployment, name)}"] = text.encode()
    return files


def _server_tls(inventory: Inventory, slice_: HostSlice) -> dict[str, bytes]:
    """The operator's own certificates for the entrances on a host."""
    wishes = {wish.name: wish for wish in inventory.deployments}
    base = Path(inventory.path).parent
    files = {}
    for unit in slice_.routers:
        router = wishes[unit.deployment].router
        if not (router.tls_cert and router.tls_key):
            continue
        for suffix, path in (("crt", router.tls_cert), ("key", router.tls_key)):
            try:
                content = (base / Path(path).expanduser()).read_bytes()
            except OSError as error:
                raise InventoryError(
                    f"deployment {unit.deployment}, router: {path}: {reason(error)}",
                    "tls_cert and tls_key name files on this machine",
                ) from error
            files[f"tls/server-{unit.deployment}.{suffix}"] = content
    return files


def _certificates(inventory: Inventory, plan: Plan, slice_: HostSlice) -> dict[str, bytes]:
    names = tls_names(slice_)
    if not names:
        return {}
    directory = state_dir(inventory) / "tls"
    authority = ensure_authority(directory)
    files = {"tls/ca.crt": authority.cert}
    host_name = slice_.host_name
    address = next(host.data_address for host in plan.hosts if host.name == host_name)
    for name in names:
        common_name = f"{'relay' if name == 'host' else name}:{host_name}"
        pair = ensure_leaf(directory, authority, common_name, host_name, address)
        files |= {f"tls/{name}.crt": pair.cert, f"tls/{name}.key": pair.key}
    return files


def _copies(
    plan: Plan, inventory: Inventory, digests: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, Copy]]:
    wishes = {wish.name: wish for wish in inventory.deployments}
    copies: dict[str, dict[str, Copy]] = {}
    for planned in plan.deployments:
        source = tokenizer_source(planned, wishes[planned.name])
        if source is None:
            continue
        found = digests.get(source, {})
        if not found.get(f"{planned.model}/tokenizer.json"):
            raise DeployError(
                f"{source}: {planned.model}/tokenizer.json is missing; the router needs it",
                "put it beside the weights, or name a directory with deployments[].tokenizer",
                code=ExitCode.REFUSED,
            )
        wanted = copies.setdefault(planned.router.host_name, {})
        for name in TOKENIZER_FILES:
            path = f"{planned.model}/{name}"
            if found.get(path):
                wanted[f"tokenizers/{planned.name}/{name}"] = Copy(source, path, found[path])
    return copies


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
