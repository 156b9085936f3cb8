"""Texts of the system, and which word was meant."""

import errno
import socket
import ssl

import pytest

from dynctl.core.text import is_name
from dynctl.files import reason
from dynctl.inventory.problems import suggest


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOENT, "No such file or directory", "/secret/path"), "No such file or directory"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('::1', 80)"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong"), "[SSL: WRONG_VERSION_NUMBER] wrong"),
        (OSError("Multiple exceptions: a, b"), "Multiple exceptions: a, b"),
    ],
)  # fmt: skip
def test_the_reason_is_the_systems_own(error, text):
    assert reason(error) == text


@pytest.mark.parametrize(
    ("word", "meant"),
    [("prot", "port"), ("hosts", "host"), ("Prefil", "prefill"), ("rot", "root")],
)
def test_letters_that_changed_places_are_nearer_than_others(word, meant):
    assert suggest(word, ["root", "port", "host", "prefill"]) == f"did you mean {meant!r}?"


@pytest.mark.parametrize("text", ["a", "e-0.b_1", "0" * 253])
def test_a_name_is_letters_digits_and_few_signs(text):
    assert is_name(text)
    for wrong in (text + "\n", text + "\r\n", text + "/", "-" + text, "\n" + text):
        assert not is_name(wrong)


@pytest.mark.parametrize("text", ["", "0" * 254, "é", "../a"])
def test_what_is_no_name(text):
    assert not is_name(text)
