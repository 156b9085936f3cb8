"""A router or relay gives its port to a successor with other code or configuration; nobody is refused meanwhile.

The successor runs beside the unit until it is ready. Then the two change names: the successor is the unit, and its
predecessor, told to end, serves who is connected until they are through. A successor that does not become ready is ended
and the unit stays what it was. Both are ordinary units under names of their own, so that a later agent knows them.
Not here: how a port changes hands (`http1.handover`). IO: files.
"""

import logging
from dataclasses import replace

from dynctl.agents.programs import OFFER_NAME, AnyProgram
from dynctl.agents.starting import Surroundings
from dynctl.agents.unit import Unit
from dynctl.core.deployment import EngineState

_log = logging.getLogger("dynctl.agent")


def is_outdated(unit: Unit, wanted_bundle: str, host: Surroundings) -> bool:
    """Tell whether a process runs other code than this agent, which has what is wanted.

    Engines are left alone: their cache is worth more.
    """
    return (
        unit.run is not None
        and unit.program.can_follow(unit.program)
        and host.bundle == wanted_bundle
        and unit.run.bundle != host.bundle
    )


def replace_process(
    units: dict[str, Unit], unit: Unit, program: AnyProgram, host: Surroundings
) -> None:
    """Run a program in a unit's place: beside its present process where that can hand over, else after it."""
    if _can_hand_over(unit, program, host):
        _start_successor(units, unit, program, host)
    else:
        unit.change(program)


def _can_hand_over(unit: Unit, program: AnyProgram, host: Surroundings) -> bool:
    return (
        unit.life.state is EngineState.READY
        and unit.run is not None
        and program.can_follow(unit.program)
        and (host.root.run / unit.run.incarnation / OFFER_NAME).exists()
    )


def next_id(unit_id: str) -> str:
    """What a unit's successor is called until it has taken over; `@` is in no unit's own name."""
    return f"{unit_id}@next"


def _start_successor(
    units: dict[str, Unit], unit: Unit, program: AnyProgram, host: Surroundings
) -> None:
    """Start what is to follow a unit, unless the very same is on its way."""
    present = units.get(next_id(unit.id))
    if present is not None and not present.is_leaving and present.program.digest == program.digest:
        return
    if present is not None:
        dismiss(units, present)
    assert unit.run is not None
    successor = Unit(program, host, next_id(unit.id))
    successor.predecessor = str(host.root.run / unit.run.incarnation / OFFER_NAME)
    units[successor.id] = successor
    successor.start()


def settle(units: dict[str, Unit]) -> None:
    """Let successors that are ready take over, and end those that will not be."""
    for successor in [unit for unit in units.values() if unit.id == next_id(unit.program.id)]:
        if successor.is_leaving:
            continue
        state = successor.life.state
        if state is EngineState.READY:
            _take_over(units, successor)
        elif state in (EngineState.BACKOFF, EngineState.FAILED):
            why = f"still the one before: its successor did not start: {successor.life.last_error}"
            _log.warning("%s is %s", successor.program.id, why)
            dismiss(units, successor)
            unit = units.get(successor.program.id)
            if unit is None:
                continue
            unit.life = replace(unit.life, last_error=why)
            if unit.life.state is not EngineState.READY:
                # It fell while it was to be followed: then nothing is lost by an ordinary restart.
                unit.change(successor.program)


def dismiss(units: dict[str, Unit], successor: Unit) -> None:
    """End a successor at once: it serves nobody."""
    del units[successor.id]
    # Another may be started while this one ends.
    successor.id = (
        f"{successor.program.id}@{successor.run.incarnation if successor.run else 'none'}"
    )
    units[successor.id] = successor
    successor.is_leaving = True
    successor.stop(now=True)


def _take_over(units: dict[str, Unit], successor: Unit) -> None:
    del units[successor.id]
    name = successor.program.id
    before = units.get(name)
    successor.id, successor.predecessor = name, None
    units[name] = successor
    if before is None:
        return
    successor.life = replace(successor.life, num_restarts=before.life.num_restarts)
    before.id = f"{name}@{before.run.incarnation if before.run else 'none'}"
    units[before.id] = before
    before.is_leaving = True
    before.stop()
