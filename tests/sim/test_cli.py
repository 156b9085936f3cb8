import signal
import subprocess
import sys


def test_the_command_has_every_option_and_serves_until_it_is_told_to_stop():
    from dynctl.sim.options import HELP

    argv = [sys.executable, "-m", "dynctl", "sim", "engine"]
    shown = subprocess.run([*argv, "--help"], capture_output=True, text=True, timeout=60).stdout
    assert [name for name in HELP if f"--{name.replace('_', '-')}" not in shown] == []

    process = subprocess.Popen(
        [*argv, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    )
    line = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=60)[1]

    assert "serving sim on http://127.0.0.1:" in line
    assert (process.returncode, rest) == (0, "")
