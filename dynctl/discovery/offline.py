"""Reads captures from files, and stands for hosts that cannot be reached when a plan needs their models.

IO: files.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dynctl.core.hardware import HostFailure, Topology
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.text import is_name
from dynctl.discovery.capture import Capture, read_captures
from dynctl.discovery.models import read_models
from dynctl.discovery.survey import Survey
from dynctl.errors import CommandError, DynctlError, UsageError
from dynctl.files import reason
from dynctl.remote.fake import FakeRemote
from dynctl.remote.port import Remote

T = TypeVar("T")

MAX_CAPTURE_BYTES = 64 * 1024**2
_MAX_FILES = 4096


def read_files(paths: Sequence[str]) -> list[Capture]:
    """Read the captures named on a command line: PATH or NAME=PATH, a directory for one host.

    Raises:
        UsageError: when a path does not exist, is too large, or names no host.
    """
    captures: list[Capture] = []
    for word in paths:
        name, equals, rest = word.partition("=")
        is_named = bool(equals) and is_name(name) and not Path(word).exists()
        path = Path(rest if is_named else word)
        owner = name if is_named else None
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
            owner = owner or path.resolve().name
            if not files or len(files) > _MAX_FILES:
                raise UsageError(f"{path} holds {len(files)} files", "name a directory with the captures of one host")  # fmt: skip
            captures += [Capture(str(file), _read(file), owner) for file in files]
        else:
            captures.append(Capture(str(path), _read(path), owner))
    return captures


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CAPTURE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}", "--from takes files or directories") from error  # fmt: skip
    if len(content) > MAX_CAPTURE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_CAPTURE_BYTES // 1024**2} MiB")
    return content


async def survey_files(inventory: Inventory, captures: Sequence[Capture]) -> Survey:
    """All that a plan is made from, out of files alone: hosts without a capture are failures.

    Models' config.json come from the script's output, else from the same path on this machine.

    Raises:
        DynctlError: when a capture cannot be read, or a model's shape is nowhere.
    """
    topology, facts = read_captures(captures, inventory.hosts)
    missing = [
        HostFailure(e.name, "no capture of this host was given", "run dynctl discover --script there", 4)
        for e in inventory.hosts
        if e.name not in facts
    ]  # fmt: skip
    topology = Topology(topology.hosts, tuple(missing), topology.warnings)
    models = {
        name: texts
        for name, found in facts.items()
        if isinstance(texts := found.facts.get("models"), dict)
    }
    files = _Files(inventory.hosts, models)
    configs: dict[str, bytes] = {}
    models_read = await read_models(inventory, topology, files, configs)
    return Survey(inventory, topology, models_read, configs)


class _Files:
    """Answers reads of models' files as the hosts would."""

    def __init__(
        self, entries: Sequence[HostEntry], models: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._entries = entries
        self._models = models

    async def map(
        self,
        work: Callable[[HostEntry, Remote], Awaitable[T]],
        hosts: Sequence[str] | None = None,
        timeout_s: float = 20.0,  # noqa: ARG002 - of the Fan interface; nothing waits here
    ) -> dict[str, T | DynctlError]:
        """Run `work` for each host with its files."""
        done: dict[str, T | DynctlError] = {}
        for entry in self._entries:
            if hosts is not None and entry.name not in hosts:
                continue
            try:
                done[entry.name] = await work(entry, _HostFiles(self._models.get(entry.name, {})))
            except DynctlError as error:
                done[entry.name] = error
        return done


class _HostFiles(FakeRemote):
    """One host's models."""

    def __init__(self, models: Mapping[str, str]) -> None:
        super().__init__()
        self._texts = {f"{path.rstrip('/')}/config.json": text for path, text in models.items()}

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Give a file the capture holds, else this machine's own of that path."""
        if path in self._texts:
            return self._texts[path].encode()[:max_bytes]
        try:
            return await asyncio.to_thread(Path(path).expanduser().read_bytes)  # noqa: ASYNC240 - reads $HOME only
        except OSError as error:
            raise CommandError(
                f"{path} is neither in the capture nor on this machine",
                "make the script anew with this inventory: dynctl discover --script -i inventory.yaml",
            ) from error
