"""The bundle: our code plus wheels for a host's Python, libc and architecture, named by its content.

Hosts need Python ≥ 3.11 and nothing else: no internet, no root, no compiler. Wheels are fetched once by pip on this
machine against hashed lock files and kept in a cache, which can be brought along to a place without a registry.
IO: files, pip.
"""

import asyncio
import gzip
import hashlib
import io
import os
import platform
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import dynctl
from dynctl.core.command import Command
from dynctl.core.hardware import Host
from dynctl.errors import DeployError, ExitCode, UnknownOutcomeError
from dynctl.files import write_atomic
from dynctl.remote.local import LocalRemote

CODE = (
    "__init__.py",
    "errors.py",
    "files.py",
    "registry.py",
    "core",
    "http1",
    "kv",
    "sim",
    "router",
    "agents",
)
"""What runs on hosts; the import contracts keep these free of the rest."""

COMPILED = "dynctl__mypyc"
"""The library behind the compiled modules, beside the package; in an installation from a compiled wheel only."""

LOCKS = ("agent.txt", "router.txt")
PIP_TIMEOUT_S = 600.0
KEEP_ARCHIVES = 8
"""Finished bundles kept in the cache, over all targets."""


@dataclass(frozen=True, slots=True)
class Target:
    """What wheels must fit."""

    python: str
    """`3.11`"""
    libc: str
    """`glibc-2.36` or `musl-1.2`"""
    arch: str
    """`x86_64` or `aarch64`"""

    @property
    def tag(self) -> str:
        """Directory name of this target's wheels."""
        return f"cp{self.python.replace('.', '')}-{self.libc}-{self.arch}"

    def runs_what_runs_on(self, other: "Target") -> bool:
        """Whether what is compiled there runs here: the same Python, no older libc."""
        return self.python == other.python and other.pip_platforms()[0] in self.pip_platforms()

    def pip_platforms(self) -> list[str]:
        """Wheel platform tags this target accepts, newest first; pip matches each one exactly."""
        kind, _, version = self.libc.partition("-")
        major, minor = [*version.split("."), "0"][:2]
        if kind == "musl":
            return [f"musllinux_{major}_{m}_{self.arch}" for m in range(int(minor), -1, -1)]
        tags = [f"manylinux_{major}_{m}_{self.arch}" for m in range(int(minor), 4, -1)]
        return [
            *tags,
            f"manylinux2014_{self.arch}",
            f"manylinux2010_{self.arch}",
            f"manylinux1_{self.arch}",
        ]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A finished archive, ready to be pushed."""

    digest: str
    path: Path
    num_bytes: int


def local_target() -> Target:
    """What fits this machine and the Python that runs here."""
    libc, version = platform.libc_ver()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Target(python, f"{libc or 'musl'}-{version or '1.2'}", platform.machine())


def target_of(host: Host) -> Target:
    """Read what a host's wheels must fit from its discovered facts.

    Raises:
        DeployError: when the host has no usable Python or an unknown libc.
    """
    if host.python is None or host.python_version is None:
        raise DeployError(
            f"{host.name}: {host.python_problem or 'the version of its Python is not known'}",
            "Debian 12 and Ubuntu 24.04 have one as python3; without root, unpack a standalone build",
            code=ExitCode.REFUSED,
        )
    libc, version, arch = (*host.platform.split("-", 2), "", "")[:3]
    if libc not in {"glibc", "musl"} or not arch:
        raise DeployError(
            f"{host.name}: unknown platform {host.platform!r}; wheels exist for Linux with glibc or musl",
            code=ExitCode.REFUSED,
        )
    return Target(".".join(host.python_version.split(".")[:2]), f"{libc}-{version}", arch)


def cache_dir() -> Path:
    """Where wheels and bundles are kept: `$DYNCTL_CACHE`, else `~/.cache/dynctl`."""
    return Path(os.environ.get("DYNCTL_CACHE") or Path.home() / ".cache" / "dynctl")


@cache
def bundle_digest(target: Target) -> str:
    """Name the bundle by what goes into it: code, locks and target. Read once: hosts of one make have one bundle."""
    return _digest(target, _code_files(target))


def _digest(target: Target, code: list[tuple[str, bytes]]) -> str:
    content = hashlib.sha256(target.tag.encode())
    for name, data in [*code, *_lock_files()]:
        content.update(f"{name}\0{len(data)}\0".encode())
        content.update(data)
    return content.hexdigest()[:16]


async def make_bundle(target: Target) -> Bundle:
    """Return the bundle for a target, building it when it is not in the cache.

    Raises:
        DeployError: when wheels cannot be had, or our own files change meanwhile; nothing is left half-made.
    """
    digest = bundle_digest(target)
    path = cache_dir() / "bundles" / f"{digest}.tar.gz"
    if not path.exists():
        wheels = await fetch_wheels(target)
        code = _code_files(target)
        if _digest(target, code) != digest:
            raise DeployError("dynctl's own files changed while it ran", "run it again")
        await asyncio.to_thread(_pack, path, code, wheels)
        _drop_old(path.parent)
    return Bundle(digest, path, path.stat().st_size)


def _drop_old(directory: Path) -> None:
    """Each change of our code makes a bundle: keep the last ones only."""
    archives = sorted(directory.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
    for path in archives[:-KEEP_ARCHIVES]:
        path.unlink(missing_ok=True)


async def fetch_wheels(target: Target) -> list[Path]:
    """Fetch the locked wheels for a target into the cache, each checked against its hash.

    Raises:
        DeployError: when pip cannot get them; says how to bring them along.
    """
    locks = b"".join(data for _, data in _lock_files())
    directory = cache_dir() / "wheels" / target.tag / hashlib.sha256(locks).hexdigest()[:16]
    done = directory / "complete"
    if not done.exists():
        directory.mkdir(parents=True, exist_ok=True)
        fault = await _run_pip(_pip_words(target, directory))
        if fault:
            raise DeployError(
                f"cannot fetch the wheels for {target.tag}: {fault}",
                f"on a machine with a package registry run any `dynctl up` for such a host, then copy {directory} here",
            )
        write_atomic(done, b"")
    return sorted(directory.glob("*.whl"))


def _pip_words(target: Target, directory: Path) -> list[str]:
    words = [sys.executable, "-m", "pip", "download", "--dest", str(directory)]
    words += ["--quiet", "--disable-pip-version-check", "--no-input"]
    words += ["--require-hashes", "--no-deps", "--only-binary", ":all:"]
    words += ["--implementation", "cp", "--python-version", target.python]
    words += [word for tag in target.pip_platforms() for word in ("--platform", tag)]
    return words + [word for name in LOCKS for word in ("-r", str(_locks_dir() / name))]


async def _run_pip(words: list[str]) -> str:
    """Run pip; return why it failed, an empty text when it did not."""
    try:
        done = await LocalRemote().run(Command(tuple(words), timeout_s=PIP_TIMEOUT_S))
    except UnknownOutcomeError:
        return f"pip did not end within {PIP_TIMEOUT_S:.0f} s"
    if done.is_ok:
        return ""
    lines = (done.stdout + done.stderr).decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if "ERROR" in line), "pip failed")


def _locks_dir() -> Path:
    return Path(__file__).parent / "locks"


def _lock_files() -> list[tuple[str, bytes]]:
    return [(name, (_locks_dir() / name).read_bytes()) for name in LOCKS]


def _code_files(target: Target) -> list[tuple[str, bytes]]:
    root = Path(dynctl.__file__).parent
    files = []
    runs_compiled = target.runs_what_runs_on(local_target())
    library = root.parent / f"{COMPILED}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if runs_compiled and library.is_file():
        files.append((library.name, library.read_bytes()))
    for name in CODE:
        top = root / name
        paths = [top] if top.is_file() else sorted(top.rglob("*"))
        wanted = [
            path
            for path in paths
            if path.is_file()
            and "__pycache__" not in path.parts
            and (runs_compiled or path.suffix != ".so")
        ]
        files += [
            (f"dynctl/{path.relative_to(root).as_posix()}", path.read_bytes()) for path in wanted
        ]
    return files


def _pack(path: Path, code: list[tuple[str, bytes]], wheels: list[Path]) -> None:
    """Write the archive with fixed order, owners and times, so that equal content gives equal bytes."""
    files = dict(code)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = PurePosixPath(member.filename)
                if (
                    member.is_dir()
                    or "tests" in name.parts
                    or name.suffix in {".pyx", ".pxd", ".c", ".h"}
                ):
                    continue
                if name.is_absolute() or ".." in name.parts:
                    raise DeployError(f"{wheel.name} holds the unsafe path {member.filename!r}")
                files[str(name)] = archive.read(member)
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for inside in sorted(files):
            entry = tarfile.TarInfo(inside)
            entry.size = len(files[inside])
            entry.mode = 0o644
            tar.addfile(entry, io.BytesIO(files[inside]))
    write_atomic(path, raw.getvalue(), mode=0o644)
