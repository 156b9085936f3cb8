"""Units as others see and as the agent remembers them: status, relay entry, record.

Not here: changing anything. IO: reads where this user's home is; else what units hold.
"""

import os
import shlex

from dynctl.agents.kv_identity import kv_identity
from dynctl.agents.programs import EngineProgram, MemberProgram, RelayProgram, RouterProgram
from dynctl.agents.protocol import MemberInfo, RelayEntry
from dynctl.agents.root import Facts, UnitRecord
from dynctl.agents.unit import Unit
from dynctl.core.deployment import EngineInfo, EngineState, UnitStatus


def unit_status(unit: Unit) -> UnitStatus:
    """How a unit stands, for people and `up`."""
    program, run, life = unit.program, unit.run, unit.life
    error = life.last_error
    if unit.is_held and life.state is EngineState.STOPPED:
        error = f"drained by request; dynctl drain --undo {unit.id} brings it back"
    return UnitStatus(
        id=unit.id,
        kind=program.kind,
        state=life.state,
        incarnation=run.incarnation if run else "",
        pid=run.identity.pid if run and run.identity else None,
        started_unix_s=run.started_unix_s if run else None,
        num_restarts=life.num_restarts,
        last_error=error,
        spec_digest=program.digest if run else unit.wanted_digest,
        role=program.role,
        deployment=program.deployment,
        url=program.url,
        gpu_uuids=program.gpu_uuids,
        bundle=run.bundle if run else "",
        beside=program.id if unit.is_aside else "",
        is_held=unit.is_held,
        seen=unit.seen,
        start_deadline_s=unit.wanted.start_deadline_s,
        command=shlex.join(run.argv) if run else "",
        leader=program.leader,
    )


def relay_entry(unit: Unit) -> RelayEntry | None:
    """How the relay reaches an engine, None for other units."""
    program, run = unit.program, unit.run
    if not isinstance(program, EngineProgram | MemberProgram):
        return None
    wish = program.wish
    facts = run.facts if run else Facts()
    can, home = program.engine.capabilities, os.environ.get("HOME", "")
    info = EngineInfo(
        id=wish.id,
        incarnation=run.incarnation if run else "",
        state=unit.life.state,
        role=wish.role,
        deployment=wish.deployment,
        kind=wish.kind,
        model=wish.name,
        block_size_tokens=facts.block_size_tokens,
        kv_capacity_tokens=facts.kv_capacity_tokens,
        max_model_len_tokens=facts.max_model_len_tokens,
        max_num_seqs=wish.max_num_seqs or 0,
        ranks=wish.dp,
        kv_identity=kv_identity(wish, can, facts.version, facts.block_size_tokens, home),
        tp=wish.tp if can.is_process else 0,
        side_channel_host=wish.data_address if wish.kv_transfer else "",
        side_channel_port=(wish.side_channel_port or 0) if wish.kv_transfer else 0,
    )
    if run is None:
        return RelayEntry(
            info=info, socket="", block_hash_seed=wish.block_hash_seed, member=member_info(unit)
        )
    at = run.at
    return RelayEntry(
        info=info,
        socket=at.socket,
        kv_events=at.kv_events,
        kv_replay=at.kv_replay,
        topic=at.topic,
        block_hash_seed=wish.block_hash_seed,
        url=at.url,
        member=member_info(unit),
    )


def member_info(unit: Unit) -> MemberInfo | None:
    """How a member of a gang stands, for the agents of the others; None for what is in no gang."""
    gang, run = unit.program.gang, unit.run
    if gang is None:
        return None
    return MemberInfo(
        id=unit.program.id,
        rank=gang.rank,
        digest=gang.digest,
        state=unit.life.state,
        incarnation=run.incarnation if run else "",
        last_incarnation=unit.last_incarnation,
        is_waiting=unit.is_waiting,
        error=unit.life.last_error,
    )


def record_of(unit: Unit) -> UnitRecord:
    """What a later agent must know to take this unit over."""
    program, run, life = unit.program, unit.run, unit.life
    return UnitRecord(
        id=unit.id,
        state=life.state,
        engine=program.wish if isinstance(program, EngineProgram | MemberProgram) else None,
        router=program.wish if isinstance(program, RouterProgram) else None,
        relay=program.wish if isinstance(program, RelayProgram) else None,
        run=run,
        num_restarts=life.num_restarts,
        log_offset=unit.log.start_offset,
        is_held=unit.is_held,
        last_incarnation=unit.last_incarnation,
    )
