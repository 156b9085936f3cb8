import pytest

from dynctl.core.plan import Parallelism
from dynctl.core.units import GIB
from dynctl.planner.checkpoint import open_model
from dynctl.planner.pairing import pair_fault
from dynctl.planner.placement import GpuKind


def fault(prefill, decode, p=1, d=1):
    kinds = [GpuKind(name, 80 * GIB) for name in (prefill, decode)]
    return pair_fault(
        open_model("llama-3.1-8b"), kinds[0], Parallelism(p), kinds[1], Parallelism(d)
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA B200", "NVIDIA GB300"),
        ("NVIDIA GB200", "NVIDIA GeForce RTX 5090"),
    ],
)
def test_kinds_with_one_default_backend_may_hand_over(one, other):
    assert fault(one, other) == fault(other, one) == ""


@pytest.mark.parametrize("other", ["NVIDIA GB300", "NVIDIA B200", "Tesla V100-SXM2-32GB", "Acme 1"])
def test_kinds_with_another_default_backend_may_not(other):
    assert "backends differ" in fault("NVIDIA H100 80GB HBM3", other)
