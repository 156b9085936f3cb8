"""A planned engine's GPUs are not all joined by NVLink although the host has NVLink. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "tp-crosses-island"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for _, pool, replica in evidence.replicas():
        host = evidence.host(replica.host_name)
        if host is None or pool.parallelism.tp < 2 or not host.nvlink_islands:
            continue
        at = {gpu.uuid: i for i, gpu in enumerate(host.gpus)}
        places = [at[p.uuid] for p in replica.gpus if p.uuid in at]
        slow = [
            (a, b)
            for a in places
            for b in places
            if a < b and not (host.gpu_links[a][b] or "").startswith("NV")
        ]
        if not slow:
            continue
        a, b = (host.gpus[i].index for i in slow[0])
        label = host.gpu_links[slow[0][0]][slow[0][1]]
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            replica.id,
            f"its GPUs are not all joined by NVLink: GPU{a} and GPU{b} by {label or 'an unknown link'}",
            tuple(
                f"GPU{host.gpus[x].index}–GPU{host.gpus[y].index}: {host.gpu_links[x][y]}"
                for x, y in slow
            ),
            "plan again; or place the engine on GPUs of one island: "
            + ", ".join(str(list(i)) for i in host.nvlink_islands),
            verify=f"nvidia-smi topo -m | awk '$1 == \"GPU{a}\" {{ print; n = ${b + 2} !~ /^NV/ }} END {{ exit !n }}'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Tensor parallelism leaves NVLink", _judge, (Need.PLAN, Need.GPUS))
