"""The digest of a plan: over stable facts of the cluster and the layout, never over estimates or texts. Pure."""

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from dynctl.core.plan import Plan, Sourced

_SPREAD = ("others", "rendezvous_port")


def digest_of(plan: Plan) -> str:
    """Hash what `up` acts on: hosts, pools, GPUs, ports, routers, limits."""
    content: dict[str, Any] = {
        "cluster": plan.cluster,
        "hosts": [asdict(host) for host in plan.hosts],
        "deployments": [
            {
                "name": d.name,
                "model": d.model,
                "engine": d.engine_kind,
                "router": asdict(d.router),
                "limits": [
                    _told(limit)
                    for limit in (
                        d.max_model_len_tokens,
                        d.max_num_seqs,
                        d.gpu_memory_utilization,
                        d.block_size_tokens,
                    )
                ],
                "pools": [
                    {
                        "role": pool.role.value,
                        "parallelism": asdict(pool.parallelism),
                        "max_num_batched_tokens": _told(pool.max_num_batched_tokens),
                        "replicas": [_used(asdict(replica)) for replica in pool.replicas],
                    }
                    for pool in d.pools
                ],
            }
            for d in plan.deployments
        ],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _used(replica: dict[str, Any]) -> dict[str, Any]:
    """A replica without what only engines over several hosts have: digests of others are as before there were any."""
    return {name: value for name, value in replica.items() if value or name not in _SPREAD}


def _told(limit: Sourced | None) -> float | None:
    return None if limit is None else float(limit.value)


def with_digest(plan: Plan) -> Plan:
    """Return the plan with its digest filled in."""
    return replace(plan, digest=digest_of(plan))
