"""What a rule looks at, and what it gives. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dynctl.core.hardware import Host
from dynctl.core.inventory import HostEntry
from dynctl.discovery.facts import HostFacts, TopoFacts


@dataclass(frozen=True, slots=True)
class Case:
    """One host, put together, beside the facts it was made of."""

    host: Host
    found: HostFacts
    topo: TopoFacts
    entry: HostEntry


Found = Iterator[tuple[str, str]]
"""Code and text of each warning."""
Rule = Callable[[Case], Found]


def gpus_in_words(indexes: Sequence[int]) -> str:
    """`GPU0, GPU1`, at most sixteen."""
    words = ", ".join(f"GPU{i}" for i in indexes[:16])
    return words + (" …" if len(indexes) > 16 else "")
