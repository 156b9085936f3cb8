"""What physics says of any estimate: sane over all models, GPUs, layouts, roles and loads."""

import itertools
import math
from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Workload
from dynctl.planner.checkpoint import open_model, shipped_names
from dynctl.planner.peaks import SPECS
from dynctl.planner.pricing import Query, price_engine

FORMATS = ("bf16", "fp8", "nvfp4")
ANY_FORMAT = st.sampled_from(["", *FORMATS, "int4"])
EITHER = st.booleans()
SIZES = st.sampled_from([1, 2, 4, 8, 16])
FIGURES = (
    "ttft_ms", "tpot_ms", "out_tok_s_per_gpu", "req_s", "memory_gib", "kv_capacity_tokens", "ttft_p50_ms",
    "ttft_p95_ms", "ttft_p99_ms", "itl_p99_ms", "goodput_req_s",
)  # fmt: skip
ROUNDED = 1.01
"""Figures have three digits: what follows each other may tie or seem to cross by one of the last."""
MANY = settings(max_examples=100, deadline=None)


@st.composite
def queries(draw, weights=ANY_FORMAT, loops=EITHER):
    """Any layout of any model on any GPU; some fit, and the others say why not."""
    layout = Parallelism(draw(SIZES), draw(st.sampled_from([1, 1, 1, 2, 4])), draw(st.sampled_from([1, 1, 2, 8])), draw(st.sampled_from([1, 1, 2, 8])))  # fmt: skip
    is_loop = draw(loops)
    work = Workload(
        draw(st.integers(1, 40_000)),
        draw(st.integers(1, 4_000)),
        1.0 if is_loop else draw(st.floats(0.01, 50)),
        draw(st.sampled_from([0.0, 0.0, 0.5, 0.95, 1.0])),
        draw(st.sampled_from([0.0, 0.5, 2.0])),
    )
    return Query(
        open_model(draw(st.sampled_from(shipped_names())), None, weights=draw(weights)),
        draw(st.sampled_from(SPECS)),
        layout,
        draw(st.sampled_from(Role)),
        work,
        float(draw(st.sampled_from([1, 3, 16, 100, 700]))) if is_loop else None,
        draw(st.sampled_from(["vllm", "sglang", "trtllm"])),
    )


def changed(query, **change):
    """The query with another load: workload fields, or any of its own."""
    own = {item.name for item in fields(Query)}
    work = replace(query.workload, **{k: v for k, v in change.items() if k not in own})
    return replace(query, workload=work, **{k: v for k, v in change.items() if k in own})


@given(queries())
@MANY
def test_every_layout_has_ordered_figures_or_a_reason(query):
    found = price_engine(query)

    if not found.feasible:
        assert found.reason
        return
    for name in FIGURES:
        figure = getattr(found, name)
        if figure is not None:
            assert 0 <= figure.low <= figure.expected <= figure.high < math.inf, name
            assert figure.source
    assert (found.ttft_ms is None) == (query.role is Role.DECODE)
    assert (found.tpot_ms is None) == (query.role is Role.PREFILL)


@given(queries(loops=st.just(True)), st.integers(1, 400))
@MANY
def test_more_users_never_shorten_anything(query, more):
    few, many = price_engine(query), price_engine(changed(query, concurrency=query.concurrency + more))  # fmt: skip

    assert few.feasible == many.feasible
    for name in ("ttft_ms", "tpot_ms"):
        if getattr(few, name) is not None:
            assert getattr(few, name).expected <= getattr(many, name).expected * ROUNDED, name


@given(queries(loops=st.just(False)), st.floats(0.01, 20))
@MANY
def test_a_higher_rate_never_shortens_anything(query, more):
    slow, fast = price_engine(query), price_engine(changed(query, rate_rps=query.workload.rate_rps + more))  # fmt: skip

    assert slow.feasible or not fast.feasible
    if not fast.feasible:
        return
    for name in ("ttft_ms", "tpot_ms", "ttft_p99_ms", "itl_p99_ms"):
        if getattr(slow, name) is not None:
            assert getattr(slow, name).expected <= getattr(fast, name).expected * ROUNDED, name


@given(queries(), st.integers(1, 20_000))
@MANY
def test_longer_prompts_never_come_sooner(query, more):
    short, long = price_engine(query), price_engine(changed(query, isl_tokens=query.workload.isl_tokens + more))  # fmt: skip

    if short.ttft_ms and long.ttft_ms:
        assert short.ttft_ms.expected <= long.ttft_ms.expected * ROUNDED


@given(queries(weights=st.just("bf16")), EITHER)
@MANY
def test_narrower_weights_are_never_slower(query, has_four):
    """Held against the same users: what a larger cache holds besides is not asked."""
    needed = 8 * query.parallelism.dp * (query.workload.isl_tokens + query.workload.osl_tokens)

    def holds_all(priced):
        return priced.feasible and priced.kv_capacity_tokens.expected > needed

    # Checkpoints in 4 bit of these keep attention wider than the ones in 8 bit do.
    has_same_modules = not (query.model.is_mla or query.model.name.startswith("gpt-oss"))
    is_four = has_four and has_same_modules and query.spec.fp4_flops
    formats = FORMATS if is_four else FORMATS[:2]
    found = []
    for weights in formats:
        model = open_model(query.model.name, 2.0, weights=weights)
        found.append(price_engine(changed(query, model=model, max_num_seqs=8)))
    for wide, narrow in itertools.pairwise(found):
        assert narrow.feasible or not wide.feasible or "compute capability" in narrow.reason
        if not narrow.feasible:
            return
        for name in ("ttft_ms", "tpot_ms"):
            if holds_all(wide) and getattr(wide, name) is not None:
                assert getattr(narrow, name).expected <= getattr(wide, name).expected * ROUNDED, (
                    name
                )
