"""A cluster as Python objects, the same as inventory.yaml: `Node` and `LLM`, pure data that becomes its document.

    from dynctl.planner.code import LLM, Node, Pool

    cluster = "lab"
    nodes = [Node(f"gpu-{i}", address=f"10.0.0.{i}") for i in range(1, 5)]
    vllm = {"kind": "vllm", "python": "/opt/vllm/bin/python"}
    chat = LLM("chat", "/models/qwen3-32b", vllm, workload={"rate_rps": 6}, slo={"ttft_ms": 500})
    big = LLM("big", "/models/r1", vllm, pools=[Pool("prefill", 2, tp=8), Pool("decode", 1, tp=8)])

The document goes through the inventory's own checks, so both give byte-equal plans.
Not here: running a user's file (`cli`), checking values (`inventory`).
Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dynctl.errors import UsageError


@dataclass(frozen=True)
class Node:
    """One host; every key of a host in inventory.yaml."""

    name: str
    address: str | None = None
    data_address: str | None = None
    user: str | None = None
    port: int | None = None
    key: str | None = None
    jump: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[str] = ()
    root: str | None = None
    python: str | None = None
    cpu_slots: int = 0
    simulated_gpus: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Pool:
    """Engines of one role."""

    role: str
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    hosts: Sequence[str] = ()
    nodes: int = 1


@dataclass(frozen=True)
class LLM:
    """One model to serve; every key of a deployment in inventory.yaml."""

    name: str
    model: str
    engine: str | Mapping[str, Any]
    """A kind (`sim`), or a mapping with `kind` and its keys."""
    served_name: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    pools: Sequence[Pool] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)
    slo: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)


_SECTIONS = ("ssh", "ports", "defaults", "groups", "api_keys")


def document(names: Mapping[str, object], file: str) -> dict[str, Any]:
    """What the names of a Python file come to: Nodes and LLMs by themselves or in lists, `cluster`, and other sections.

    Raises:
        UsageError: when there is no Node, or `cluster` is no text.
    """
    nodes = list(_found(names.values(), Node))
    llms = list(_found(names.values(), LLM))
    cluster = names.get("cluster")
    if not isinstance(cluster, str):
        raise UsageError(f"{file} names no cluster", 'write cluster = "NAME"')
    if not nodes:
        raise UsageError(f"{file} has no Node", "write nodes = [Node(...)]")
    made: dict[str, Any] = {"cluster": cluster}
    for section in _SECTIONS:
        value = names.get(section)
        if isinstance(value, Mapping | list):
            made[section] = value
    made["hosts"] = [_plain(node) for node in nodes]
    made["deployments"] = [_plain(llm) for llm in llms]
    return made


def _found(values: Iterable[object], kind: type) -> Iterable[object]:
    """Objects of a kind, in the order they are first named; each once."""
    seen: set[int] = set()
    for value in values:
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, kind) and id(item) not in seen:
                seen.add(id(item))
                yield item


def _plain(item: object) -> Any:  # noqa: ANN401 - a document's value
    """An object as a document: what keeps its default is left out."""
    if isinstance(item, Node | LLM | Pool):
        made = {}
        for each in fields(item):
            value = getattr(item, each.name)
            if each.name in {"engine", "role"} or (value and value != each.default):
                made[each.name] = _plain(value)
        return made
    if isinstance(item, Mapping):
        return {str(key): _plain(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_plain(value) for value in item]
    return item
