"""RDMA devices cannot reach GPU memory: no peer memory module and no dma-buf. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import as_root, root_line

CODE = "peer-memory-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        software = host.software
        if (
            not software.modules
            or software.has_dmabuf
            or not host.gpus
            or host.gpus[0].is_simulated
        ):
            continue
        if not any(nic.kind != "ethernet" and nic.state == "up" for nic in host.nics):
            continue
        if {"nvidia_peermem", "nv_peer_mem"} & set(software.modules):
            continue
        fix = ("modprobe", "nvidia_peermem")
        yield Finding(
            CODE,
            red_if(evidence.is_split(host.name)),
            host.name,
            "",
            "RDMA devices cannot reach GPU memory: neither nvidia_peermem nor dma-buf; KV goes through host memory",
            (f"modules: {', '.join(software.modules)}", f"dma-buf: {software.has_dmabuf}"),
            "load nvidia_peermem, and name it in /etc/modules-load.d so that it comes back after a reboot",
            root_line(host, *fix),
            as_root(host, *fix),
            verify="awk '/^(nvidia_peermem|nv_peer_mem) / { n++ } END { print n + 0 \" peer memory modules\"; exit n > 0 }' /proc/modules",
            verify_on=host.name,
        )


CHECK = Check(CODE, "GPU memory closed to the NIC", _judge, (Need.GPUS, Need.RDMA))
