"""Which unit may hold which GPU of this host.

Not here: asking NVML who holds memory (`gpus`). A lease begins before a process is started and ends when its
whole group is gone, so that two engines never meet on one GPU.
Pure.
"""

from collections.abc import Iterable, Mapping

from dynctl.errors import EngineError

Leases = Mapping[str, str]
"""GPU uuid to unit id."""


def holders(leases: Leases, unit_id: str, gpu_uuids: Iterable[str]) -> dict[str, str]:
    """The GPUs among these that another unit holds, with that unit."""
    return {uuid: leases[uuid] for uuid in gpu_uuids if uuid in leases and leases[uuid] != unit_id}


def grant(leases: Leases, unit_id: str, gpu_uuids: Iterable[str]) -> dict[str, str]:
    """Return the leases with these GPUs given to a unit; giving it what it holds changes nothing.

    Raises:
        EngineError: when another unit holds one of them; nothing is given then.
    """
    wanted = tuple(gpu_uuids)
    if len(set(wanted)) != len(wanted):
        raise EngineError(f"{unit_id} names a GPU twice", "check the GPU list in the plan")
    taken = holders(leases, unit_id, wanted)
    if taken:
        uuid, holder = next(iter(taken.items()))
        raise EngineError(
            f"GPU {uuid} is leased to {holder}, so {unit_id} cannot have it",
            "give each engine its own GPUs in the plan",
        )
    return {**leases, **dict.fromkeys(wanted, unit_id)}


def release(leases: Leases, unit_id: str) -> dict[str, str]:
    """Return the leases without those of a unit."""
    return {uuid: holder for uuid, holder in leases.items() if holder != unit_id}
