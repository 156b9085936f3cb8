"""NICs: ports, rates, and what is near which GPU. Pure."""

from collections import Counter
from collections.abc import Sequence

from dynctl.core.hardware import Nic
from dynctl.core.tolerances import is_flapping
from dynctl.discovery.nics import ports_of
from dynctl.discovery.rdma import CARD_NAMES
from dynctl.discovery.rules.case import Case, Found, Rule, gpus_in_words
from dynctl.planner.grouping import link_rank

_SLOW_BITS_S = 50 * 10**9
_SERVER_GPUS = 4
"""Smaller machines are rarely joined with others over RDMA."""
_WHY = {
    "polling": " (polling: cable or switch port)",
    "disabled": " (disabled)",
    "sleep": " (sleeping)",
}


def _rdma(case: Case) -> list[Nic]:
    return [nic for nic in case.host.nics if nic.kind != "ethernet"]


def _join(nics: Sequence[Nic]) -> str:
    return ", ".join(nic.name for nic in nics[:16]) + (" …" if len(nics) > 16 else "")


def down(case: Case) -> Found:
    """Ports that are down, and what that leaves."""
    rdma = _rdma(case)
    for nic in rdma:
        if nic.state == "down":
            yield "port-down", f"{nic.name} is down{_WHY.get(nic.physical or '', '')}"
    for port in ports_of(case.found):
        if port.state == "init":
            yield (
                "port-init",
                f"{port.device} port {port.port} waits in INIT: no subnet manager configured it",
            )
    data = [nic for nic in rdma if not nic.is_management]
    by_card = Counter(nic.card for nic in data if nic.card)
    if not by_card or (
        not any(nic.rate_bits_s for nic in data) and any(n.state == "up" for n in data)
    ):
        return  # which kind is the fastest cannot be told
    card = max(by_card, key=lambda name: (max(n.rate_bits_s or 0 for n in data if n.card == name), by_card[name]))  # fmt: skip
    same = [nic for nic in data if nic.card == card]
    lost = [nic for nic in same if nic.state == "down"]
    name = CARD_NAMES.get(card, card)
    if lost and len(lost) == len(same):
        yield (
            "rdma-all-down",
            f"all {len(same)} {name} ({card}) ports are down: no RDMA path to other hosts",
        )
    elif lost:
        yield (
            "rdma-some-down",
            f"{len(lost)} of {len(same)} {name} ({card}) ports are down ({_join(lost)}): GPUs near them use others",
        )


def roles(case: Case) -> Found:
    """Devices that are no data NICs."""
    rdma = _rdma(case)
    if managed := [nic for nic in rdma if nic.is_management]:
        yield (
            "nic-management",
            f"{_join(managed)} are functions of one card that serves the NVSwitch subnet: no data NICs",
        )
    up = [nic for nic in rdma if nic.state == "up" and nic.rate_bits_s and not nic.is_management]
    top = max((nic.rate_bits_s or 0 for nic in up), default=0)
    if up and top < _SLOW_BITS_S:
        yield (
            "rdma-slow",
            f"the fastest RDMA port runs at {top / 1e9:g} Gb/s: slow for KV transfer",
        )
    slow = [nic for nic in up if (nic.rate_bits_s or 0) * 2 <= top and nic.kind == "roce"]
    if slow:
        rates = ", ".join(f"{nic.name} at {(nic.rate_bits_s or 0) / 1e9:g}" for nic in slow[:8])
        yield (
            "nic-slower",
            f"{rates} Gb/s beside ports of {top / 1e9:g}: management or storage, not for KV traffic",
        )
    bonds = [nic for nic in rdma if nic.bond or "bond" in nic.name]
    if bonds:
        shared = Counter(nic.bond for nic in bonds if nic.bond)
        joint = ", ".join(f"{count} in {bond}" for bond, count in shared.items() if count > 1)
        yield "nic-bonded", f"{_join(bonds)}: bonded devices{f' ({joint})' if joint else ''}"


def faults(case: Case) -> Found:
    """Ports that work below what they should."""
    rdma = [nic for nic in _rdma(case) if not nic.is_management]
    for nic in rdma:
        is_single = nic.bond is None
        if is_single and 0 < (nic.rate_bits_s or 0) < (nic.rate_max_bits_s or 0):
            rate, most = (nic.rate_bits_s or 0) / 1e9, (nic.rate_max_bits_s or 0) / 1e9
            card = CARD_NAMES.get(nic.card or "", nic.card)
            yield (
                "rdma-below-card",
                f"{nic.name} ({card}) runs at {rate:g} of {most:g} Gb/s: a split cable, a smaller board, or degraded; compare with the other hosts",
            )
        if is_flapping(nic):
            yield "rdma-flapping", f"{nic.name}: its link went down {nic.num_link_downed} times"
        if nic.kind == "roce" and nic.state == "up" and nic.mtu_bytes in {256, 512, 1024}:
            yield (
                "rdma-mtu",
                f"{nic.name}: active RDMA MTU is {nic.mtu_bytes}: the network device has 1500; set 9000 on both ends",
            )
    yield from _odd_network(rdma)


def _odd_network(rdma: Sequence[Nic]) -> Found:
    """A RoCE port whose addresses lie in another network than those of all others."""
    places: dict[str, set[str]] = {}
    for nic in rdma:
        for gid in nic.gids:
            if gid.ipv4:
                place = ".".join(gid.ipv4.split(".")[:2])
                places.setdefault(place, set()).add(nic.name)
    if len(places) < 2 or sum(map(len, places.values())) < 3:
        return
    most = max(places, key=lambda place: len(places[place]))
    for place, names in sorted(places.items()):
        if place != most and len(names) == 1 and len(places[most]) > 1:
            (name,) = names
            netdev = next((n.netdev for n in rdma if n.name == name), None)
            yield (
                "nic-other-network",
                f"{name}{f' ({netdev})' if netdev else ''} has its address in another network than the other RoCE ports: management, not for KV traffic",
            )


def near(case: Case) -> Found:
    """What is near which GPU."""
    host = case.host
    if not host.gpus or host.gpus[0].is_simulated:
        return
    if len(host.gpus) >= _SERVER_GPUS and not host.gpu_nic_links and not host.gpu_nics:
        yield (
            "nic-affinity-unknown",
            "which NIC is near which GPU is unknown (none listed by topo -m)",
        )
    if not host.gpu_nic_links:
        return
    nearest = {name for _, names in host.gpu_nics for name in names}
    far = [
        gpu.index
        for gpu, row in zip(host.gpus, host.gpu_nic_links, strict=True)
        if max((link_rank(cell) for cell in row), default=0) == 1
    ]
    if far:
        better = [gpu.index for gpu in host.gpus if gpu.index not in far]
        advice = f"; put KV transfer on {gpus_in_words(better)}" if better else ""
        yield (
            "nic-far",
            f"{gpus_in_words(far)}: the nearest NIC is across the socket link (SYS){advice}",
        )
    if lonely := [name for name in host.nic_names if name not in nearest]:
        yield (
            "nic-near-no-gpu",
            f"{', '.join(lonely[:24])}: nearest to no GPU (management or storage): keep KV traffic off",
        )


RULES: tuple[Rule, ...] = (down, roles, faults, near)
