"""An RDMA port runs slower than its card can, or than its twins do. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import rdma_port, where
from dynctl.core.hardware import Host, Nic

CODE = "port-slow"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    twins: dict[str, int] = {}
    for host in evidence.topology.hosts:
        for nic in host.nics:
            if nic.card and nic.rate_bits_s:
                twins[nic.card] = max(twins.get(nic.card, 0), nic.rate_bits_s)
    for host in evidence.topology.hosts:
        alike = max((n.rate_bits_s or 0 for n in host.nics if n.kind != "ethernet"), default=0)
        near = {name for _, names in host.gpu_nics for name in names}
        for nic in host.nics:
            if (
                nic.kind == "ethernet"
                or nic.state != "up"
                or not nic.rate_bits_s
                or nic.is_management
            ):
                continue
            if nic.bond or "bond" in nic.name:
                continue  # a bond has the rate its members and mode give it
            best = max(
                nic.rate_max_bits_s or 0,
                twins.get(nic.card or "", 0),
                alike if {nic.name, nic.device} & near else 0,
            )
            if nic.rate_bits_s >= 0.9 * best:
                continue
            yield _finding(evidence, host, nic, best)


def _finding(evidence: Evidence, host: Host, nic: Nic, best: int) -> Finding:
    now, could = (f"{rate / 1e9:g}" for rate in (nic.rate_bits_s or 0, best))
    return Finding(
        CODE,
        red_if(evidence.uses_nic(host.name, nic)),
        host.name,
        nic.name,
        f"runs at {now} of {could} Gb/s",
        (f"negotiated {now} Gb/s, {nic.card or nic.kind} can or its twins do {could} Gb/s",),
        "check cable and transceiver, the switch port's speed setting, and for lanes that are down",
        verify=where(
            f"$1 < {0.9 * best / 1e9:g}",
            f"{rdma_port(nic)}/rate",
        ),
        verify_on=host.name,
    )


CHECK = Check(CODE, "RDMA port below its rate", _judge, (Need.RDMA,))
