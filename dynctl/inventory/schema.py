"""The keys of inventory.yaml, their types, defaults and meanings; the JSON Schema for editors comes from here.

Not here: positions (`values`), references between parts and the nouns the rest of dynctl uses (`build`).
Pure.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)

from dynctl.core.router_settings import DEFAULTS, NAMES
from dynctl.core.units import parse_bytes

SSH_PATTERN_TAG, HOST_TAG, TEXT_TAG, LIST_TAG = "<ssh>", "<host>", "<text>", "<list>"
ENGINE_TAG = "<engine>"
TAGS = frozenset({SSH_PATTERN_TAG, HOST_TAG, TEXT_TAG, LIST_TAG, ENGINE_TAG})
"""Parts of error paths that are not in the file."""


def _number(value: object) -> object:
    """Take a number written as text, as an environment variable gives it; a boolean is no number."""
    if isinstance(value, bool):
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic collects ValueError only
    if isinstance(value, str):
        try:
            return float(value) if "." in value or "e" in value.lower() else int(value)
        except ValueError:
            return value
    return value


def _size(value: object) -> object:
    if isinstance(value, str):
        return parse_bytes(value)
    return _number(value)


def _false_is_none(value: object) -> object:
    return None if value is False else value


def _flag_value(value: object) -> object:
    """true is a bare flag; everything else has become text before."""
    if value is True:
        return ""
    if value is False:
        raise ValueError("false is no flag value; write the engine's own no-NAME: true")
    return value


def _kind(item: object) -> str:
    if isinstance(item, dict):
        return SSH_PATTERN_TAG if "from_ssh_config" in item else HOST_TAG
    return TEXT_TAG if isinstance(item, str) else HOST_TAG


def _hosts_kind(value: object) -> str:
    is_pattern = isinstance(value, dict) and "from_ssh_config" in value
    return SSH_PATTERN_TAG if is_pattern else LIST_TAG


Text = Annotated[str, Field(min_length=1, max_length=4096)]
Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Port = Annotated[Int, Field(ge=1, le=65535)]
Count = Annotated[Int, Field(ge=1, le=4096)]
Size = Annotated[
    int,
    BeforeValidator(_size),
    Field(gt=0, le=1024**5),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["80GiB"]}),
]

Settings = Annotated[
    dict[Text, Float],
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                name: {
                    "type": "integer" if isinstance(getattr(DEFAULTS, name), int) else "number",
                    "minimum": 0,
                    "default": getattr(DEFAULTS, name),
                }
                for name in NAMES
            },
        }
    ),
]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class SimulatedGpusPart(_Part):
    """GPUs declared where there are none, so that layouts can be tried; every output says that they are simulated."""

    count: Count
    """How many."""
    name: Text = "Simulated GPU"
    """Name as a driver would report it, such as `NVIDIA H100 80GB HBM3`."""
    memory: Size = 80 * 1024**3
    """Memory of each, such as 80GiB."""


class HostDefaultsPart(_Part):
    """Values for every host that does not set its own."""

    user: Text | None = None
    """Login name. Without it: `~/.ssh/config`, then the operator's own."""
    port: Port | None = None
    """sshd's port. Without it: `~/.ssh/config`, then 22."""
    key: Text | None = None
    """Private key file; only this one is offered. Without it: `~/.ssh/config`, the agent, the usual files."""
    jump: Text | None = None
    """Jump hosts as for `ssh -J`, comma-separated; `none` for none. Without it: `~/.ssh/config`."""
    labels: dict[str, Text] = {}
    """Free names and values, for `--limit label=value`."""
    groups: list[Text] = []
    """Names of groups the host belongs to, for pools and `--limit`."""
    root: Text | None = None
    """Directory for everything dynctl keeps on the host. Without it: `~/.dynctl`."""
    python: Text | None = None
    """Python ≥ 3.11 that runs dynctl's agent. Without it: found on the host."""
    cpu_slots: Annotated[Int, Field(ge=0, le=1024)] = 0
    """Engines that need no GPU which may run here."""
    simulated_gpus: SimulatedGpusPart | None = None
    """GPUs to pretend where there are none."""


class HostPart(HostDefaultsPart):
    """One host, or several alike by a range in the name."""

    name: Text
    """Name in every output. A range makes several: `gpu-[01-08]`."""
    address: Text | None = None
    """Host name, alias of `~/.ssh/config`, or IP; `local` is this machine without SSH. May hold a range as the name does. Without it: the name."""
    data_address: Text | None = None
    """Address engines exchange KV over, when it is another network. May hold a range as the name does."""


class SshPatternPart(HostDefaultsPart):
    """Every host of `~/.ssh/config` whose alias fits a pattern."""

    from_ssh_config: Text
    """Glob over the aliases, such as `gpu-*`."""


HostItem = Annotated[
    Annotated[Text, Tag(TEXT_TAG)]
    | Annotated[HostPart, Tag(HOST_TAG)]
    | Annotated[SshPatternPart, Tag(SSH_PATTERN_TAG)],
    Discriminator(_kind),
]


class SshPart(_Part):
    """How hosts are reached."""

    config: Annotated[
        str | None,
        BeforeValidator(_false_is_none),
        WithJsonSchema({"type": ["string", "boolean"]}),
    ] = "~/.ssh/config"
    """OpenSSH client configuration to apply; false for none."""
    known_hosts: Text = "~/.ssh/known_hosts"
    """File of known host keys. A changed key is always refused."""
    host_keys: Literal["strict", "accept-new"] = "strict"
    """`strict`: a new host key needs a yes at the terminal, else it is refused. `accept-new`: it is added and named."""
    connect_timeout_s: Annotated[Float, Field(gt=0, le=300)] = 10.0
    """Longest wait for a connection, and for a login."""
    keepalive_s: Annotated[Float, Field(gt=0, le=300)] = 5.0
    """A connection is lost after three intervals of this length without an answer."""
    parallel: Annotated[Int, Field(ge=1, le=256)] = 32
    """Hosts at work at a time."""


class PortsPart(_Part):
    """Ports dynctl may use on hosts: relays, KV transfer side channels."""

    base: Annotated[Int, Field(ge=1024, le=65535)] = 18800
    """The first."""
    count: Annotated[Int, Field(ge=8, le=20000)] = 200
    """How many."""


class EnginePart(_Part):
    """Which engine serves, and how it is started."""

    kind: Text
    """`vllm`, `sim` (simulated, needs no GPU) or `external` (servers that already run)."""
    python: Text | None = None
    """Interpreter of the engine's own environment on the hosts, such as /opt/vllm/bin/python (vllm)."""
    args: dict[str, Annotated[str, BeforeValidator(_flag_value)]] = {}
    """Further engine flags, without dashes; true is a bare flag, lists and mappings become JSON."""
    env: dict[str, str] = {}
    """Environment variables. `${env:NAME}`, `${file:PATH}` and `${cmd:PROGRAM …}` are resolved only when engines start."""
    urls: list[Text] = []
    """Base URLs of the servers to adopt (external)."""
    allow_old_version: bool = False
    """Accept an engine older than the supported one, as CPU test machines need."""
    device: Literal["gpu", "cpu"] = "gpu"
    """What the engine runs on (vllm)."""
    start_deadline_s: Annotated[Float, Field(gt=0, le=86400)] | None = None
    """How long a start may take until a token comes; without it 1800 for vllm, 60 for external, 30 for sim."""


def _engine_kind(item: object) -> str:
    return TEXT_TAG if isinstance(item, str) else ENGINE_TAG


class PoolPart(_Part):
    """An explicit layout for one role."""

    role: Literal["prefill", "decode", "aggregated"]
    """`prefill` and `decode` work together; `aggregated` engines do both."""
    replicas: Annotated[Int, Field(ge=1, le=1024)] = 1
    """Engines in this pool."""
    tp: Count = 1
    """Tensor parallel size."""
    pp: Count = 1
    """Pipeline parallel size."""
    dp: Count = 1
    """Data-parallel ranks, each on tp × pp GPUs and with a KV cache of its own."""
    ep: Count = 1
    """Expert parallel size: 1, or all tp × dp ranks."""
    nodes: Count = 1
    """Hosts each engine is over, with an equal share of its GPUs on each. Of aggregated engines without dp."""
    hosts: list[Text] = []
    """Host names, globs or groups it may use. Without it: any."""


class WorkloadPart(_Part):
    """Expected traffic, for planning."""

    isl_tokens: Annotated[Int, Field(ge=1, le=10_000_000)] = 1024
    """Typical prompt length (ISL)."""
    osl_tokens: Annotated[Int, Field(ge=1, le=10_000_000)] = 128
    """Typical answer length (OSL)."""
    rate_rps: Annotated[Float, Field(gt=0, le=1e6)] = 1.0
    """Requests per second."""
    shared_prefix_ratio: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of each prompt that others have sent before, 0 to 1."""
    isl_cv: Annotated[Float, Field(ge=0, le=10)] = 0.0
    """How prompt lengths vary: their standard deviation over their mean; 0: all alike."""
    num_prefixes: Annotated[Int, Field(ge=1, le=10**9)] = 1
    """How many different shared prefixes there are; those that do not fit the cache are not hit."""


class SloPart(_Part):
    """Latency goals at p99."""

    ttft_ms: Annotated[Float, Field(gt=0, le=1e9)] | None = None
    """Time to first token."""
    itl_ms: Annotated[Float, Field(gt=0, le=1e9)] | None = None
    """Time between tokens."""
    tpot_ms: Annotated[Float, Field(gt=0, le=1e9)] | None = None
    """Another name for itl_ms; write one of them."""


class LimitsPart(_Part):
    """Engine limits. Without one: derived by the plan."""

    max_model_len_tokens: Annotated[Int, Field(ge=1, le=10**9)] | None = None
    """Longest prompt and answer together."""
    max_num_seqs: Annotated[Int, Field(ge=1, le=10**6)] | None = None
    """Requests an engine runs at a time."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory an engine may take."""
    block_size_tokens: Annotated[Int, Field(ge=1, le=1024)] | None = None
    """Tokens in one KV block."""
    max_num_batched_tokens: Annotated[Int, Field(ge=1, le=10**9)] | None = None
    """Tokens one step of an engine computes at most; longer prompts are computed in pieces."""


class RouterPart(_Part):
    """The OpenAI entrance of a deployment."""

    host: Text | None = None
    """Host it runs on. Without it: one without GPUs if there is one."""
    listen: Text = "127.0.0.1:8000"
    """Address and port. Other than loopback needs api_keys and TLS, or allow_insecure_listen."""
    policy: Text = "kv"
    """How an engine is chosen: `kv`, `prefix`, `least_loaded`, `round_robin` or `random`."""
    allow_insecure_listen: bool = False
    """Listen beyond loopback without keys or TLS."""
    tls_cert: Text | None = None
    """Certificate chain, a file on the operator's machine."""
    tls_key: Text | None = None
    """Its private key."""
    route_key_field: Text | None = None
    """Field of a request's body, as `user` or `metadata.team`, that names its route key where no header does."""
    settings: Settings = Field(default_factory=dict)
    """Limits and rates of the router by name, where they shall differ from the defaults."""


class DeploymentPart(_Part):
    """One model to serve."""

    name: Text
    """Name in every output, and the start of engine names."""
    model: Text
    """Model directory on the hosts (vllm), or a served name (sim, external)."""
    served_name: Text | None = None
    """Name clients ask for. Without it: the directory's last part."""
    revision: Text | None = None
    """Revision of the weights; another one never shares KV blocks with this one."""
    tokenizer: Text | None = None
    """Directory with tokenizer.json and the chat template on the router's host.

    Without it: the model's; external servers do not hand theirs out, and are then routed by blocks of text.
    """
    engine: Annotated[
        Annotated[Text, Tag(TEXT_TAG)] | Annotated[EnginePart, Tag(ENGINE_TAG)],
        Discriminator(_engine_kind),
    ]
    """The engine's kind, or a mapping."""
    pools: list[PoolPart] = []
    """Explicit layout. Without it: the plan decides."""
    workload: WorkloadPart = WorkloadPart()
    """Expected traffic."""
    slo: SloPart = SloPart()
    """Latency goals."""
    limits: LimitsPart = LimitsPart()
    """Engine limits."""
    shape: dict[Text, Annotated[Float, Field(ge=0)]] = {}
    """Numbers of the model that its config.json lacks, by the names used there, for an architecture dynctl does not know."""
    router: RouterPart = RouterPart()
    """The entrance."""


class ApiKeyPart(_Part):
    """A client's key."""

    name: Text
    """Name in metrics and logs."""
    key: Text
    """`${env:NAME}`, `${file:PATH}` or `${cmd:PROGRAM …}`; never the key itself."""
    priority: Literal["high", "normal", "low"] = "high"
    """The most urgent class its requests may ask for, by `X-Dynctl-Priority`."""
    route_key: Text | None = None
    """What its requests count as in metrics and expected answers, unless they say. Without it: the key's name."""


class InventoryFile(_Part):
    """inventory.yaml: hosts, and what they are to serve."""

    cluster: Text
    """Name of the whole."""
    ssh: SshPart = SshPart()
    """SSH configuration, host keys and time limits."""
    ports: PortsPart = PortsPart()
    """Ports dynctl may use on hosts."""
    defaults: HostDefaultsPart = HostDefaultsPart()
    """What hosts take that leave a key out."""
    hosts: Annotated[
        Annotated[list[HostItem], Field(min_length=1), Tag(LIST_TAG)]
        | Annotated[SshPatternPart, Tag(SSH_PATTERN_TAG)],
        Discriminator(_hosts_kind),
    ]
    """Each a name (`[user@]name[:port]`), or a mapping; or one `from_ssh_config: PATTERN`."""
    groups: dict[str, list[Text]] = {}
    """Names for sets of hosts: host names or globs."""
    deployments: list[DeploymentPart] = []
    """Models to serve."""
    api_keys: list[ApiKeyPart] = []
    """Clients that may use the entrances. Without any: no key is asked for, and only loopback is served."""


PARTS: dict[str, type[BaseModel]] = {
    "": InventoryFile,
    "ssh": SshPart,
    "ports": PortsPart,
    "defaults": HostDefaultsPart,
    HOST_TAG: HostPart,
    SSH_PATTERN_TAG: SshPatternPart,
    "simulated_gpus": SimulatedGpusPart,
    "deployments": DeploymentPart,
    ENGINE_TAG: EnginePart,
    "pools": PoolPart,
    "workload": WorkloadPart,
    "slo": SloPart,
    "limits": LimitsPart,
    "router": RouterPart,
    "api_keys": ApiKeyPart,
}
"""Which keys may stand where: by the last name on the way there."""


def keys_at(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys a mapping at an error path may have."""
    names = [part for part in loc if isinstance(part, str)]
    part = PARTS.get(names[-1] if names else "")
    return () if part is None else tuple(part.model_fields)


def json_schema() -> dict[str, Any]:
    """The schema editors use for completion and checks: JSON Schema draft-07."""
    made = InventoryFile.model_json_schema(mode="validation")
    schema: dict[str, Any] = _draft_07(made)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _draft_07(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Rename what draft 2020-12 calls otherwise.

    A $ref hides its neighbours in draft-07, so it is wrapped; a number may also come from `${NAME}`.
    """
    if isinstance(value, list):
        return [_draft_07(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {
        "definitions" if key == "$defs" else key: _draft_07(item) for key, item in value.items()
    }
    if made.get("type") in ("integer", "number"):
        outer = {key: made.pop(key) for key in ("title", "description", "default") if key in made}
        return {**outer, "anyOf": [made, {"type": "string", "pattern": r"\$\{"}]}
    if "$ref" in made:
        ref = made.pop("$ref").replace("#/$defs/", "#/definitions/")
        return {"$ref": ref} if not made else {**made, "allOf": [{"$ref": ref}]}
    return made
