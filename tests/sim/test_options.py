from dataclasses import fields

import pytest

from dynctl.errors import UsageError
from dynctl.sim.options import HELP, MODEL_DIR, SimOptions, parse_args
from dynctl.sim.text import TextModel


def test_every_option_has_a_flag_and_a_help_line():
    assert list(HELP) == [field.name for field in fields(SimOptions)]
    options = parse_args(
        [
            "--uds",
            "/x",
            "--block-size",
            "32",
            "--decode-ms",
            "2.5",
            "--fault",
            "hang",
            "--fault",
            "split",
        ]
    )

    assert (options.block_size, options.decode_ms, options.fault) == (32, 2.5, ("hang", "split"))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--uds", "/x", "--listen", "h:1"],
        ["--listen", "nowhere"],
        ["--listen", "h:99999"],
        ["--uds", "/x", "--role", "prefill"],
        ["--uds", "/x", "--role", "boss", "--side-channel", "h:1"],
        ["--uds", "/x", "--kv-replay", "ipc://r"],
        ["--uds", "/x", "--num-blocks", "10"],
        ["--uds", "/x", "--decode-ms", "-1"],
        ["--uds", "/x", "--max-num-seqs", "0"],
        ["--uds", "/x", "--kv-transfer-mbytes-s", "0"],
        ["--uds", "/x", "--host-mbytes-s", "0"],
        ["--uds", "/x", "--host-blocks", "-1"],
        ["--uds", "/x", "--fault", "explode"],
    ],
    ids=" ".join,
)
def test_flags_that_make_no_sense_are_refused(flags):
    with pytest.raises(UsageError):
        parse_args(flags)


def test_the_cache_holds_the_longest_request_by_itself():
    assert SimOptions(max_model_len=100_000).num_cache_blocks == 6251
    assert SimOptions(max_model_len=1000).num_cache_blocks == 4096
    assert SimOptions(num_blocks=70, max_model_len=1000).num_cache_blocks == 70


def test_the_shipped_model_is_small_and_its_words_round_trip(text):
    assert (MODEL_DIR / "tokenizer.json").stat().st_size < 300 * 1024
    assert len(text.words) > 500
    for token in text.words:
        assert text.encode(text.piece(token), add_special_tokens=False) == [token]
    said = "".join(map(text.piece, text.words))
    assert text.encode(said, add_special_tokens=False) == list(text.words)


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(Exception, match="no usable tokenizer"):
        TextModel(tmp_path)


def test_the_process_says_what_is_wrong_and_exits_with_usage(capfd):
    import sys

    from dynctl.sim.__main__ import main

    before, sys.argv = sys.argv, ["sim", "--uds", "/x", "--fault", "explode"]
    try:
        assert main() == 2
    finally:
        sys.argv = before
    assert "unknown fault" in capfd.readouterr().err


def test_a_busy_address_is_an_error_that_names_it(tmp_path, start_engine):
    import subprocess
    import sys

    engine = start_engine("busy")
    argv = [sys.executable, "-m", "dynctl.sim", "--uds", str(engine.socket)]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=60)

    assert second.returncode == 1
    assert str(engine.socket) in second.stderr
    assert engine.http.get("/health").status_code == 200
