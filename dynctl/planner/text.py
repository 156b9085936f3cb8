"""plan.yaml: a Plan as text a person can read, edit and diff, and back again, strictly.

The same plan gives the same bytes. Numbers that are computed carry a comment with their size for people.
Not here: whether an edited plan still fits the cluster (`check`), files.
Pure.
"""

import json
import re
from collections.abc import Iterator, Sequence

from dynctl.core.plan import (
    Estimate,
    Figure,
    Member,
    MemorySheet,
    Parallelism,
    Plan,
    PlannedDeployment,
    PlannedGpu,
    PlannedHost,
    Pool,
    Replica,
    Role,
    RouterPlan,
    Sourced,
)
from dynctl.core.units import format_bytes, format_count
from dynctl.errors import PlanError
from dynctl.inventory.document import Listing, Mapping, Node, Scalar, parse
from dynctl.inventory.problems import Problem, ProblemsError, Spot, listed
from dynctl.planner.faults import Loc, PlanFaultsError
from dynctl.planner.tree import Keys, Reader

SCHEMA = 1

_HEAD = """\
# What dynctl up will bring about on this cluster. Made by dynctl plan; edit it, then run dynctl up again:
# it is checked against the cluster and estimated anew before anything is changed.
#
# hosts         machine_id is how a host is recognised; relay_port is its one mutual-TLS port for data
# pools         replicas of one role: prefill, decode or aggregated; parallelism tp × pp × dp GPUs each;
#               max_num_batched_tokens bounds a step, so that long prompts are computed in pieces
# source        how a number was got; engines are started with it unless it says that they are not told
# gpus          the uuid is the identity, the index is for readers
# memory        of one GPU (or CPU slot): reserve, weights, activations; the rest holds KV
# estimate      low, expected, high, and how the figure was got; not part of the digest
# digest        over hosts and layout; an edit makes it differ, which dynctl up says before it goes on
"""
_PLAIN = re.compile(r"^[A-Za-z/][A-Za-z0-9_./@+-]*(?: [A-Za-z0-9_./@+(),×-]+)*$")
_TRAPS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}


def to_yaml(plan: Plan) -> str:
    """Write a plan."""
    return _HEAD + "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"schema: {SCHEMA}"
    yield f"cluster: {_text(plan.cluster)}"
    yield f"digest: {_text(plan.digest)}"
    yield from _texts("warnings", plan.warnings, "")
    yield "hosts:" if plan.hosts else "hosts: []"
    for host in plan.hosts:
        yield f"  - name: {_text(host.name)}"
        yield f"    machine_id: {_text(host.machine_id)}"
        yield f"    data_address: {_text(host.data_address)}"
        yield f"    relay_port: {host.relay_port}"
    yield "deployments:" if plan.deployments else "deployments: []"
    for deployment in plan.deployments:
        yield from _deployment(deployment)


def _deployment(planned: PlannedDeployment) -> Iterator[str]:
    yield f"  - name: {_text(planned.name)}"
    yield f"    model: {_text(planned.model)}"
    yield f"    engine: {_text(planned.engine_kind)}"
    yield f"    verdict: {_text(planned.verdict)}"
    yield from _texts("reasons", planned.reasons, "    ")
    router = planned.router
    yield "    router:"
    yield f"      host: {_text(router.host_name)}"
    yield f"      listen: {_text(router.listen)}"
    yield f"      policy: {_text(router.policy)}"
    for key, limit in (
        ("max_model_len_tokens", planned.max_model_len_tokens),
        ("max_num_seqs", planned.max_num_seqs),
        ("gpu_memory_utilization", planned.gpu_memory_utilization),
        ("block_size_tokens", planned.block_size_tokens),
    ):
        if limit is not None:
            yield f"    {key}: {_sourced(limit)}"
    if planned.estimate is not None:
        yield "    estimate:"
        yield f"      ttft_ms: {_figure(planned.estimate.ttft_ms)}"
        yield f"      itl_ms: {_figure(planned.estimate.itl_ms)}"
        yield f"      out_tokens_s: {_figure(planned.estimate.out_tokens_s)}  # at most"
        if planned.estimate.goodput_rps is not None:
            goodput = _figure(planned.estimate.goodput_rps)
            yield f"      goodput_rps: {goodput}  # within the goals, of those wished"
    yield "    pools:" if planned.pools else "    pools: []"
    for pool in planned.pools:
        yield from _pool(pool)


def _pool(pool: Pool) -> Iterator[str]:
    p = pool.parallelism
    yield f"      - role: {pool.role.value}"
    yield f"        parallelism: {{tp: {p.tp}, pp: {p.pp}, dp: {p.dp}, ep: {p.ep}}}"
    if pool.max_num_batched_tokens is not None:
        yield f"        max_num_batched_tokens: {_sourced(pool.max_num_batched_tokens)}"
    if pool.memory is not None:
        yield from _memory(pool.memory)
    yield "        replicas:" if pool.replicas else "        replicas: []"
    for replica in pool.replicas:
        yield f"          - id: {_text(replica.id)}"
        yield f"            host: {_text(replica.host_name)}"
        if replica.gpus:
            yield "            gpus:"
            for gpu in replica.gpus:
                yield f"              - {{index: {gpu.index}, uuid: {_quoted(gpu.uuid)}}}"
        if replica.side_channel_port is not None:
            yield f"            side_channel_port: {replica.side_channel_port}"
        if replica.others:
            if replica.rendezvous_port is not None:
                yield f"            rendezvous_port: {replica.rendezvous_port}"
            yield "            others:  # its further parts; all meet at rendezvous_port of the first"
            for member in replica.others:
                yield f"              - host: {_text(member.host_name)}"
                if member.gpus:
                    yield "                gpus:"
                    for gpu in member.gpus:
                        yield f"                  - {{index: {gpu.index}, uuid: {_quoted(gpu.uuid)}}}"
        if replica.nics:
            yield f"            nics: [{', '.join(_quoted(nic) for nic in replica.nics)}]"


def _memory(memory: MemorySheet) -> Iterator[str]:
    yield "        memory:"
    for key, value in (
        ("total_bytes", memory.total_bytes),
        ("reserve_bytes", memory.reserve_bytes),
        ("weight_bytes", memory.weight_bytes),
        ("activation_bytes", memory.activation_bytes),
        ("kv_bytes", memory.kv_bytes),
    ):
        yield f"          {key}: {value}  # {format_bytes(value)}"
    tokens = memory.kv_capacity_tokens
    yield f"          kv_capacity_tokens: {tokens}  # {format_count(tokens)} in the whole engine"
    yield f"          source: {_text(memory.source)}"


def _sourced(limit: Sourced) -> str:
    return f"{{value: {_number(limit.value)}, source: {_quoted(limit.source)}}}"


def _figure(figure: Figure) -> str:
    low, expected, high = (_number(v) for v in (figure.low, figure.expected, figure.high))
    return f"{{low: {low}, expected: {expected}, high: {high}, source: {_quoted(figure.source)}}}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _texts(key: str, texts: Sequence[str], indent: str) -> Iterator[str]:
    if texts:
        yield f"{indent}{key}:"
        for text in texts:
            yield f"{indent}  - {_text(text)}"


def _text(text: str) -> str:
    """A scalar: plain where every YAML reader takes it for the same text, else quoted."""
    return text if _PLAIN.match(text) and text.lower() not in _TRAPS else _quoted(text)


def _quoted(text: str) -> str:
    # A JSON string is a YAML double-quoted scalar; what YAML forbids raw is escaped.
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]|[\ud800-\udfff]",
        lambda match: f"\\u{ord(match[0]):04x}",
        json.dumps(text, ensure_ascii=False),
    )


def from_yaml(text: str, path: str = "plan.yaml") -> Plan:
    """Read a plan.

    Raises:
        InventoryError: with every problem, its line and column; unknown and missing keys are problems.
    """
    root, problems = parse(text)
    reader = Reader(list(problems))
    if not problems:
        plan = _read_plan(reader, root)
        if not reader.problems:
            return plan
    raise ProblemsError(path, text, reader.problems, "correct it, or make a new one: dynctl plan")


def located(error: PlanFaultsError, text: str, path: str) -> PlanError:
    """The same error, with the line of the plan's file each fault stands on."""
    root, _ = parse(text)
    problems = [Problem(_spot(root, fault.loc), fault.text, fault.hint) for fault in error.faults]
    return PlanError(
        f"the plan does not fit the cluster: {listed(path, text, sorted(problems))}", error.hint
    )


def _spot(root: Node, loc: Loc) -> Spot:
    """Where a value stands; for one that is not there, where what should hold it does."""
    spot = root.spot
    for part in loc:
        if isinstance(root, Mapping) and part in root.entries:
            spot, root = root.entries[str(part)]
        elif isinstance(root, Listing) and isinstance(part, int) and part < len(root.items):
            root = root.items[part]
            spot = root.spot
        else:
            return spot
    return root.spot if isinstance(root, Scalar) else spot


def _read_plan(reader: Reader, root: object) -> Plan:
    top = reader.mapping(root, "schema cluster digest hosts deployments", "warnings")
    if top.integer("schema") != SCHEMA:
        top.say("schema", f"this dynctl reads plans of schema {SCHEMA}", "make the plan again")
    return Plan(
        cluster=top.text("cluster"),
        digest=top.text("digest"),
        warnings=tuple(top.texts("warnings")),
        hosts=tuple(_read_host(reader, node) for node in top.items("hosts")),
        deployments=tuple(_read_deployment(reader, node) for node in top.items("deployments")),
    )


def _read_host(reader: Reader, node: object) -> PlannedHost:
    at = reader.mapping(node, "name machine_id data_address relay_port")
    return PlannedHost(
        at.text("name"),
        at.text("machine_id"),
        at.text("data_address"),
        at.integer("relay_port", 1, 65535),
    )


def _read_deployment(reader: Reader, node: object) -> PlannedDeployment:
    at = reader.mapping(
        node,
        "name model engine router pools",
        "verdict reasons max_model_len_tokens max_num_seqs gpu_memory_utilization block_size_tokens estimate",
    )
    router = reader.mapping(at.node("router"), "host listen policy")
    return PlannedDeployment(
        name=at.text("name"),
        model=at.text("model"),
        engine_kind=at.text("engine"),
        verdict=at.text("verdict", ""),
        reasons=tuple(at.texts("reasons")),
        router=RouterPlan(router.text("host"), router.text("listen"), router.text("policy")),
        max_model_len_tokens=_read_sourced(reader, at.node("max_model_len_tokens")),
        max_num_seqs=_read_sourced(reader, at.node("max_num_seqs")),
        gpu_memory_utilization=_read_share(reader, at.node("gpu_memory_utilization")),
        block_size_tokens=_read_sourced(reader, at.node("block_size_tokens")),
        estimate=_read_estimate(reader, at.node("estimate")),
        pools=tuple(_read_pool(reader, node) for node in at.items("pools")),
    )


def _read_sourced(reader: Reader, node: object) -> Sourced | None:
    if node is None:
        return None
    at = reader.mapping(node, "value", "source")
    return Sourced(at.integer("value", 1), at.text("source", "edited"))


def _read_share(reader: Reader, node: object) -> Sourced | None:
    if node is None:
        return None
    at = reader.mapping(node, "value", "source")
    share = at.number("value")
    if not 0 < share <= 1:
        at.say("value", "a share of memory is above 0 and at most 1", "write 0.9")
    return Sourced(share, at.text("source", "edited"))


def _read_estimate(reader: Reader, node: object) -> Estimate | None:
    if node is None:
        return None
    at = reader.mapping(node, "ttft_ms itl_ms out_tokens_s", "goodput_rps")
    ttft, itl, rate = (
        _read_figure(reader, at.node(key)) for key in ("ttft_ms", "itl_ms", "out_tokens_s")
    )
    goodput = at.node("goodput_rps")
    return Estimate(ttft, itl, rate, None if goodput is None else _read_figure(reader, goodput))


def _read_figure(reader: Reader, node: object) -> Figure:
    at = reader.mapping(node, "low expected high", "source")
    return Figure(
        at.number("low"), at.number("expected"), at.number("high"), at.text("source", "edited")
    )


def _read_pool(reader: Reader, node: object) -> Pool:
    at = reader.mapping(node, "role replicas", "parallelism max_num_batched_tokens memory")
    sizes = reader.mapping(at.node("parallelism"), "", "tp pp dp ep")
    role = Role(at.one_of("role", [role.value for role in Role]))
    memory = None
    if at.node("memory") is not None:
        keys = "total_bytes reserve_bytes weight_bytes activation_bytes kv_bytes kv_capacity_tokens"
        sheet = reader.mapping(at.node("memory"), keys, "source")
        memory = MemorySheet(
            total_bytes=sheet.integer("total_bytes"),
            reserve_bytes=sheet.integer("reserve_bytes"),
            weight_bytes=sheet.integer("weight_bytes"),
            activation_bytes=sheet.integer("activation_bytes"),
            kv_bytes=sheet.integer("kv_bytes"),
            kv_capacity_tokens=sheet.integer("kv_capacity_tokens"),
            source=sheet.text("source", "edited"),
        )
    return Pool(
        role,
        Parallelism(*(sizes.integer(key, 1, 1024, default=1) for key in ("tp", "pp", "dp", "ep"))),
        tuple(_read_replica(reader, node, role) for node in at.items("replicas")),
        memory,
        _read_sourced(reader, at.node("max_num_batched_tokens")),
    )


def _read_replica(reader: Reader, node: object, role: Role) -> Replica:
    at = reader.mapping(node, "id host", "gpus side_channel_port nics others rendezvous_port")
    others = []
    for item in at.items("others"):
        part = reader.mapping(item, "host", "gpus")
        others.append(Member(part.text("host"), _read_gpus(reader, part)))
    return Replica(
        id=at.text("id"),
        role=role,
        host_name=at.text("host"),
        gpus=_read_gpus(reader, at),
        side_channel_port=_read_port(at, "side_channel_port"),
        nics=tuple(at.texts("nics")),
        others=tuple(others),
        rendezvous_port=_read_port(at, "rendezvous_port"),
    )


def _read_gpus(reader: Reader, at: Keys) -> tuple[PlannedGpu, ...]:
    gpus = []
    for item in at.items("gpus"):
        gpu = reader.mapping(item, "index uuid")
        gpus.append(PlannedGpu(gpu.text("uuid"), gpu.integer("index", 0)))
    return tuple(gpus)


def _read_port(at: Keys, key: str) -> int | None:
    return None if at.node(key) is None else at.integer(key, 1, 65535)
