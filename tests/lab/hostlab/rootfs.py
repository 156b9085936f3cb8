"""The hosts' root file system and the machine's own packages: made once, then cached.

The mirror is the machine's own: read from its apt sources when the file system is made.
IO: files, processes (apt-get, debootstrap, chroot).
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hostlab.shell import LabError, run

# libnuma1 is what vLLM's CPU build links to; the rest is a small Debian server.
ROOTFS_PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "libpam-systemd",
    "dbus-user-session",
    "openssh-server",
    "python3",
    "python3-venv",
    "iproute2",
    "procps",
    "ca-certificates",
    "libnuma1",
)
MACHINE_PACKAGES = {
    "debootstrap": "debootstrap",
    "systemd-nspawn": "systemd-container",
    "nft": "nftables",
    "ip": "iproute2",
    "gcc": "gcc",
    "ssh": "openssh-client",
    "nsenter": "util-linux",
}
"""Program looked for → Debian package that brings it."""

OPS_USER = "ops"
OPS_UID = 5000
"""Unlike any uid usual on a machine, so that a process left behind is told from others."""

_PREPARE_REVISION = "1"
"""Raise it when `_prepare` changes: the cached file system is then made again."""

_QUIET_UNITS = (
    "console-getty.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
)
"""Masked: they only cost time on hosts that live for minutes."""


@dataclass(frozen=True, slots=True)
class AptSource:
    """Where the machine's own packages come from."""

    uri: str
    suite: str
    keyring: str | None


def cache_dir() -> Path:
    """Return the lab's cache directory: `lab` below `$DYNCTL_CACHE`, by default below `~/.cache/dynctl`."""
    given = os.environ.get("DYNCTL_CACHE")
    return (Path(given).absolute() if given else Path.home() / ".cache" / "dynctl") / "lab"


def os_release() -> dict[str, str]:
    """Return the fields of /etc/os-release."""
    fields = {}
    for line in Path("/etc/os-release").read_text().splitlines():
        name, sep, value = line.partition("=")
        if sep:
            fields[name] = value.strip().strip('"')
    return fields


def is_debian_like() -> bool:
    """Tell whether the machine is Debian or Ubuntu."""
    try:
        release = os_release()
    except OSError:
        return False
    return bool({"debian", "ubuntu"} & {release.get("ID", ""), *release.get("ID_LIKE", "").split()})


def missing_programs() -> list[str]:
    """Return which programs of the lab the machine lacks."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in MACHINE_PACKAGES if shutil.which(name, path=path) is None]


def install_machine_packages() -> list[str]:
    """Install what the lab needs on this machine and return the packages installed.

    openssh-server is added only where systemd is not running: there it would start a server.
    """
    packages = sorted({MACHINE_PACKAGES[name] for name in missing_programs()})
    if not Path("/usr/sbin/sshd").exists() and not Path("/run/systemd/system").exists():
        packages.append("openssh-server")
    if "gcc" in packages:
        packages.append("libc6-dev")
    if not packages:
        return []
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    if run(install, check=False, timeout_s=600, env=env).returncode != 0:
        run(["apt-get", "update", "-q"], timeout_s=300, env=env)
        run(install, timeout_s=600, env=env)
    return packages


def apt_source() -> AptSource:
    """Find the machine's own Debian or Ubuntu archive in its apt sources.

    Raises:
        LabError: when no source carries this release's main suite.
    """
    codename = os_release().get("VERSION_CODENAME", "")
    root = Path("/etc/apt")
    for path in sorted(root.glob("sources.list.d/*.sources")):
        for stanza in path.read_text().split("\n\n"):
            source = _deb822_source(stanza, codename)
            if source is not None:
                return source
    for path in [root / "sources.list", *sorted(root.glob("sources.list.d/*.list"))]:
        for line in path.read_text().splitlines() if path.exists() else ():
            source = _one_line_source(line, codename)
            if source is not None:
                return source
    raise LabError(f"no apt source on this machine carries the suite {codename!r}")


def _deb822_source(stanza: str, codename: str) -> AptSource | None:
    fields: dict[str, str] = {}
    for line in stanza.splitlines():
        name, sep, value = line.partition(":")
        if sep and not line.startswith(("#", " ", "\t")):
            fields[name.strip().lower()] = value.strip()
    is_archive = "deb" in fields.get("types", "").split() and "main" in fields.get("components", "")
    if not is_archive or codename not in fields.get("suites", "").split():
        return None
    signed_by = fields.get("signed-by", "")
    keyring = signed_by if signed_by.startswith("/") else None
    return AptSource(fields["uris"].split()[0], codename, keyring)


def _one_line_source(line: str, codename: str) -> AptSource | None:
    words = line.split()
    if not words or words[0] != "deb":
        return None
    keyring = None
    if words[1].startswith("["):
        end = next(i for i, word in enumerate(words) if word.endswith("]"))
        for option in " ".join(words[1 : end + 1]).strip("[] ").split():
            if option.startswith("signed-by=/"):
                keyring = option.removeprefix("signed-by=")
        words = [words[0], *words[end + 1 :]]
    if len(words) < 4 or words[2] != codename or "main" not in words[3:]:
        return None
    return AptSource(words[1], codename, keyring)


def rootfs_path() -> Path:
    """Return where the file system for this package list lies, or will lie."""
    suite = os_release().get("VERSION_CODENAME", "unknown")
    text = "\n".join([suite, _PREPARE_REVISION, *_QUIET_UNITS, *ROOTFS_PACKAGES])
    return cache_dir() / f"rootfs-{suite}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ensure_rootfs() -> Path:
    """Return the hosts' root file system, made by debootstrap when it isn't in the cache."""
    final = rootfs_path()
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final.parent / "rootfs.lock"):
        if final.exists():
            return final
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        source = apt_source()
        keyring = [f"--keyring={source.keyring}"] if source.keyring else []
        include = f"--include={','.join(ROOTFS_PACKAGES)}"
        argv = ["debootstrap", "--variant=minbase", *keyring, include]
        print("lab: making the hosts' root file system (a few minutes, once)", file=sys.stderr)
        run([*argv, source.suite, str(partial), source.uri], timeout_s=1500)
        _prepare(partial)
        partial.rename(final)
    return final


def _prepare(root: Path) -> None:
    """Make a fresh Debian tree a lab host: the user `ops`, key-only sshd, nothing that waits."""
    run(["chroot", str(root), "useradd", "-m", "-u", str(OPS_UID), "-s", "/bin/bash", OPS_USER])
    linger = root / "var/lib/systemd/linger"
    linger.mkdir(parents=True, exist_ok=True)
    (linger / OPS_USER).touch()
    for unit in _QUIET_UNITS:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    (root / "etc/ssh/sshd_config.d/lab.conf").write_text(
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\nUseDNS no\n"
        "MaxStartups 100\nMaxSessions 100\n"
    )
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/machine-id").write_text("")
    # apt wrote the mirror's address here; hosts have no network to use it on.
    (root / "etc/apt/sources.list").write_text("")
    for name in ("var/cache/apt/archives", "var/lib/apt/lists"):
        for path in (root / name).glob("*"):
            if path.is_file():
                path.unlink()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock so that two sessions do not make the same thing at once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def why_impossible() -> str | None:
    """Say in one line why this machine cannot run the lab, None when it can."""
    if os.geteuid() != 0:
        return "not root"
    if not is_debian_like():
        return "not Debian or Ubuntu"
    missing = missing_programs()
    if missing:
        return f"{', '.join(missing)} not installed; run scripts/lab_setup"
    if not Path("/sys/fs/cgroup").exists() or "cgroup2" not in Path("/proc/mounts").read_text():
        return "no cgroup2 mount"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "network namespaces are not allowed here"
