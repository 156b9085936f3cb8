"""Every check fires on what is wrong and on nothing else, and its verify command says the same without dynctl."""

import importlib
import pkgutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from checkcases import world
from checkcases.build import (
    b_host,
    eth,
    evidence,
    gpu,
    host,
    nic,
    planned,
    replica,
    split_plan,
)

from dynctl.checks.examine import examine, grouped, load_checks, select
from dynctl.checks.finding import Severity
from dynctl.cli.doctor_evidence import from_captures
from dynctl.core.hardware import GpuProcess, GpuState
from dynctl.core.inventory import HostEntry
from dynctl.core.machine import Clock, Limits
from dynctl.core.units import GIB
from dynctl.discovery.capture import Capture, read_captures
from dynctl.discovery.facts import HostFacts, TopoFacts
from dynctl.discovery.judge import judge_host
from dynctl.errors import DynctlError, UsageError

CHECKS = load_checks()


def _cases():
    import checkcases

    for module in pkgutil.iter_modules(checkcases.__path__):
        if module.name.endswith("_cases"):
            yield from importlib.import_module(f"checkcases.{module.name}").CASES


CASES = tuple(_cases())
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.code)


def test_every_check_has_a_case():
    assert {case.code for case in CASES} == set(CHECKS)


@EACH
def test_a_check_fires_on_its_fault(case):
    report = examine(case.fires, {case.code: CHECKS[case.code]})

    assert report.findings, f"skipped: {report.skipped}"
    first = report.findings[0]
    assert first.code == case.code
    assert first.severity.value == case.severity
    assert first.text
    assert first.evidence
    assert first.fix
    assert first.verify
    assert case.says in f"{first.text} {' '.join(first.evidence)}"


@EACH
def test_a_check_is_quiet_without_its_fault(case):
    assert examine(case.quiet, {case.code: CHECKS[case.code]}).findings == ()


@EACH
def test_the_verify_command_holds_where_the_finding_does(case, tmp_path):
    finding = examine(case.fires, {case.code: CHECKS[case.code]}).findings[0]

    status, said = world.run(finding.verify, case.true, tmp_path)

    assert status == 0, f"{finding.verify}\n{said}"


@EACH
def test_the_verify_command_fails_once_it_is_cured(case, tmp_path):
    finding = examine(case.fires, {case.code: CHECKS[case.code]}).findings[0]

    status, said = world.run(finding.verify, case.false, tmp_path)

    assert status != 0, f"{finding.verify}\n{said}"
    assert "unexpected:" not in said
    assert "syntax error" not in said.lower()


def test_a_healthy_cluster_has_no_finding():
    assert examine(planned(), CHECKS).findings == ()


def test_what_cannot_be_judged_is_skipped_and_not_ok():
    report = examine(evidence(host(gpus=(), nics=()), plan=None, audits={}), CHECKS)

    assert dict(report.skipped)["gpu-mig"] == "there are no GPUs"
    assert dict(report.skipped)["port-clash"] == "there is no plan yet"
    assert "gpu-mig" not in report.passed


def test_hostile_names_are_cleaned_and_quoted():
    name = "\x1b[31mevil'; touch /tmp/owned; echo '\n[red]" + "x" * 100_000
    process = GpuProcess(1, name, name, None, False)
    found = examine(
        planned(host(gpus=(gpu(0, state=GpuState.BUSY, processes=(process,)),))), CHECKS
    ).findings

    assert found
    for finding in found:
        for text in (finding.text, *finding.evidence, finding.fix, finding.verify):
            assert "\x1b" not in text
            assert "\n" not in text
            assert len(text) <= 1000


@pytest.mark.parametrize("code", ["public-data-address", "data-address-foreign"])
def test_a_hostile_address_runs_nothing_in_a_verify_line(code, tmp_path):
    address = "2001:4860::1%$(touch owned)'$(touch owned)'"
    found = planned(host(data_address=address), plan=split_plan(address=address))
    (finding,) = [f for f in CHECKS[code].judge(found) if f.host_name == "a"]

    subprocess.run(["sh", "-c", finding.verify], cwd=tmp_path, capture_output=True, timeout=60, check=False)  # fmt: skip

    assert not (tmp_path / "owned").exists()


def test_equal_findings_of_several_hosts_are_one_group():
    sick = {"has_persistence": False}
    hosts = [host(n, gpus=(gpu(0, n, health=sick),)) for n in ("a", "b", "c")]
    groups = grouped(examine(evidence(*hosts), CHECKS).findings)

    names = [g.host_names for g in groups if g.finding.code == "gpu-persistence-off"]
    assert names == [("a", "b", "c")]


def test_findings_come_worst_first():
    report = examine(
        planned(
            host(gpus=(gpu(0, state=GpuState.LOST), gpu(1, health={"has_persistence": False})))
        ),
        CHECKS,
    )

    ranks = [finding.severity.rank for finding in report.findings]
    assert ranks == sorted(ranks, reverse=True)
    assert report.findings[0].severity is Severity.RED
    assert report.is_red


def test_limits_of_a_users_units_are_proved_by_that_users_systemd(tmp_path):
    """A login session may have other limits than the units the agent runs in."""
    user = {"is_root": False, "has_linger": True, "has_systemd_user": True}
    hosts = host(unit_limits=Limits(65536, 1024), session_limits=Limits(-1, 1048576), **user)
    found = {f.code: f for f in examine(planned(hosts), CHECKS).findings}

    for code, bad, good in (
        ("memlock-low", "DefaultLimitMEMLOCK=65536", "DefaultLimitMEMLOCKSoft=infinity"),
        ("nofile-low", "DefaultLimitNOFILE=1024", "DefaultLimitNOFILESoft=524288"),
    ):
        line = found[code].verify
        assert world.run(line, world.World({"systemctl": world.says(bad)}), tmp_path / code)[0] == 0
        cured = world.World({"systemctl": world.says(good)})
        assert world.run(line, cured, tmp_path / f"{code}-good")[0] != 0


@pytest.mark.parametrize(
    ("named", "port", "is_used"),
    [
        ("mlx5_1", nic("mlx5_1"), True),
        ("mlx5_1:1", nic("mlx5_1"), True),
        ("mlx5_10", nic("mlx5_1"), False),
        ("mlx4_0:2", nic("mlx4_0:2", port=2), True),
        ("mlx4_0:1", nic("mlx4_0:2", port=2), False),
    ],
)
def test_a_port_is_used_by_its_own_name_only(named, port, is_used):
    found = planned(plan=split_plan(replica(nics=(named,))))

    assert found.uses_nic("a", port) is is_used
    assert not found.uses_nic("b", port)


def test_simulated_engines_need_no_rdma():
    """What would stop a real transfer between these hosts is no fault for a simulated one."""
    plan = split_plan()
    sim = replace(plan, deployments=tuple(replace(d, engine_kind="sim") for d in plan.deployments))
    hosts = (host(nics=(nic(kind="roce"), eth())), b_host())

    assert any(
        f.code == "transfer-fabric-differs" for f in examine(planned(*hosts), CHECKS).findings
    )
    found = examine(planned(*hosts, plan=sim), CHECKS).findings
    assert [f for f in found if f.code == "transfer-fabric-differs"] == []


def test_an_unknown_check_is_refused_with_those_that_are_near():
    with pytest.raises(UsageError) as caught:
        select(CHECKS, ["gpu-migg"])

    assert "gpu-mig" in (caught.value.hint or "")


CAPTURES = sorted((Path(__file__).parents[1] / "discovery" / "cases").glob("*/*/stdout.txt"))


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.parent.name)
def test_checks_judge_public_captures_without_inventing_faults(path):
    """A single tool's output leaves most facts unknown: nothing may be concluded from what is not there."""
    try:
        topology, _ = read_captures([Capture(str(path), path.read_bytes())])
    except DynctlError:
        pytest.skip("not a capture by itself")
    report = examine(from_captures(topology, None), CHECKS)

    told = {"driver-mismatch", "driver-missing", "gpu-lost", "driver-hangs", "gpu-missing", "gpu-access-denied", "nvlink-inactive"}  # fmt: skip
    assert {f.code for f in report.findings if f.severity is Severity.RED} <= told
    for finding in report.findings:
        syntax = subprocess.run(
            ["sh", "-n", "-c", finding.verify], capture_output=True, check=False
        )
        assert syntax.returncode == 0, finding.verify


def memlock(**facts):
    sick = host(session_limits=Limits(64 * 1024, 1048576), **facts)
    (finding,) = examine(planned(sick), {"memlock-low": CHECKS["memlock-low"]}).findings
    return finding


SUDO = world.World({"sudo": 'exec "$@"\n', "systemctl": "echo $*\n"}, {"/etc/security/limits.d/README": ""})  # fmt: skip


def test_a_limit_is_lifted_for_the_user_who_logs_in_root_as_well(tmp_path):
    """A line for `*` in limits.d does not count for root."""
    fix = memlock(is_root=False, has_systemd_user=False).fix_command

    status, _ = world.run(fix, SUDO, tmp_path)

    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    written = tmp_path / "etc/security/limits.d/90-dynctl-limitmemlock.conf"
    assert (status, written.read_text()) == (0, f"{user} - memlock unlimited\n")


def test_a_limit_of_user_units_is_lifted_where_they_get_it_from(tmp_path):
    limits = Limits(64 * 1024, 1048576)
    fix = memlock(is_root=False, has_systemd_user=True, unit_limits=limits).fix_command

    status, said = world.run(fix, SUDO, tmp_path)

    written = tmp_path / "etc/systemd/system/user@.service.d/dynctl-limitmemlock.conf"
    assert (status, said) == (0, "daemon-reload\n")
    assert written.read_text() == "[Service]\nLimitMEMLOCK=infinity\n"


def codes_of(text):
    topology, _ = read_captures([Capture("a.txt", text.encode())])
    return {f.code for f in examine(from_captures(topology, None), CHECKS).findings}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (" \tGPU0\tGPU1\t\n GPU0\tX\tNS\t\n GPU1\tNS\tX\t\n", "p2p-off"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "driver-mismatch"),
        ("CA 'mlx5_0'\n\tCA type: MT4123\n\tPort 1:\n\t\tState: Active\n\t\tPhysical state: LinkUp\n\t\tRate: 100\n\t\tLink layer: InfiniBand\n", "port-slow"),
        ("CA 'mlx5_0'\n\tPort 1:\n\t\tState: Down\n\t\tPhysical state: Polling\n\t\tRate: 10\n\t\tLink layer: InfiniBand\n", "port-down"),
        ("hca_id:\tmlx5_0\n\t\tport:\t1\n\t\t\tstate:\t\tPORT_ACTIVE (4)\n\t\t\tactive_mtu:\t1024 (3)\n\t\t\tlink_layer:\tEthernet\n", "rdma-mtu-small"),
    ],
)  # fmt: skip
def test_captures_alone_fire_what_they_show(text, code):
    assert codes_of(text) == {code}


def flapping(losses, state="up"):
    return host(nics=(nic(num_link_downed=losses, state=state), eth()))


def locking(limit, **facts):
    return host(is_root=False, session_limits=Limits(limit, 1048576), has_linger=True, **facts)


@pytest.mark.parametrize(
    ("one", "codes"),
    [
        (host(clock=Clock(-2.1, 0.05)), {"clock-skew"}),
        (host(clock=Clock(1.9, 0.0)), set()),
        (host(clock=Clock(2.1, 0.2)), set()),
        (flapping(10), {"port-flapping", "rdma-flapping"}),
        (flapping(9), set()),
        (flapping(200, "down"), set()),
        (locking(64 * GIB), {"memlock-low"}),
        (locking(512 * GIB), set()),
        (locking(64 * 1024, nics=(eth(),)), set()),
    ],
)
def test_discovery_and_doctor_judge_the_same_facts_alike(one, codes):
    asked = {"clock-skew", "memlock-low", "port-flapping", "rdma-flapping"}
    judged = judge_host(one, HostFacts(), TopoFacts((), ()), HostEntry("a", "192.168.0.1"))
    told = {warning.code for warning in judged.warnings} & asked
    found = {finding.code for finding in examine(planned(one), CHECKS).findings} & asked

    assert told | found == codes
    assert bool(told) is bool(found)
