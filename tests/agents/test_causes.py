"""Deaths read from real last lines of vLLM, torch and Python."""

import pytest

from dynctl.agents.causes import classify

CASES = [
    (
        "oom",
        False,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...",
    ),
    ("oom", False, "ValueError: No available memory for the cache blocks. Try increasing ..."),
    (
        "oom",
        False,
        "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).",
    ),
    ("port", False, "OSError: [Errno 98] Address already in use"),
    ("cuda", False, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("config", True, "vllm serve: error: unrecognized arguments: --enable-magic"),
    (
        "config",
        True,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    ),
    (
        "config",
        True,
        "ValueError: User-specified max_model_len (99999) is greater than the derived max_model_len",
    ),
    ("config", True, "ModuleNotFoundError: No module named 'vllm'"),
    (
        "config",
        True,
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'",
    ),
]


@pytest.mark.parametrize(("kind", "is_final", "line"), CASES)
def test_known_deaths_are_named(kind, is_final, line):
    cause = classify(1, ["Traceback (most recent call last):", '  File "x.py", line 1', line])

    assert (cause.kind, cause.is_final) == (kind, is_final)
    assert line[:60] in cause.text
    assert "exited with 1" in cause.text


def test_reason_beats_its_consequence():
    lines = ["CUDA out of memory", "RuntimeError: CUDA error: device-side assert triggered"]

    assert classify(1, lines).kind == "oom"


def test_warning_about_an_optional_part_is_no_reason():
    lines = ["WARNING 11-01 No module named 'flashinfer'", "RuntimeError: engine core died"]

    cause = classify(1, lines)

    assert (cause.kind, cause.is_final) == ("exit", False)
    assert "engine core died" in cause.text


def test_what_was_ready_once_is_not_misconfigured():
    lines = ["ModuleNotFoundError: No module named 'late'"]

    assert classify(1, lines).is_final
    assert not classify(1, lines, was_ready=True).is_final


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "killed by SIGKILL, perhaps"),
        (-11, "killed by SIGSEGV"),
        (None, "ended"),
        (3, "with 3"),
    ],
)
def test_without_words_the_exit_status_speaks(status, text):
    assert text in classify(status, []).text


def test_last_telling_line_is_quoted_clean_and_short():
    lines = ["first", "ValueError: \x1b[31mbad\x1b[0m " + "y" * 500, "    ^^^^", ""]

    text = classify(1, lines).text

    assert "ValueError: bad" in text
    assert "\x1b" not in text
    assert len(text) < 250
