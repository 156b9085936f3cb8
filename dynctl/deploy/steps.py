"""What has to be done, as values: one idempotent step on one host each. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from dynctl.agents.protocol import AgentStatus, HostSlice

Tell = Callable[[str, str, str], None]
"""Called with host, step and text at every change."""


class StepKind(StrEnum):
    """In the order they are taken on a host."""

    BUNDLE = "bundle"
    """Push and unpack our code and wheels."""
    FILES = "files"
    """Replace certificates and tokenizer files."""
    AGENT = "agent"
    """Start the agent, or restart it with another bundle; engines go on running."""
    SLICE = "slice"
    """Tell the agent what to run."""
    RETIRE = "retire"
    """Stop everything and remove dynctl from a host the plan no longer names."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action on one host."""

    host_name: str
    kind: StepKind
    detail: str
    """What it changes, for the operator."""
    is_disruptive: bool = False
    """Stops something that runs: its KV cache is lost."""


@dataclass(frozen=True, slots=True)
class HostState:
    """What was found on one host."""

    host_name: str
    bundles: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    """Digest of each managed file by its path below the root; empty text: absent."""
    launch: tuple[tuple[str, str], ...] = ()
    """How the agent was last started: scope, unit, bundle_path."""
    status: AgentStatus | None = None
    """None: no agent answers."""


@dataclass(frozen=True, slots=True)
class HostGoal:
    """What one host shall look like."""

    slice: HostSlice
    bundle: str
    bundle_path: str
    scope: str
    files: tuple[tuple[str, str], ...] = field(default=())
    """Digest of each managed file by its path below the root."""
