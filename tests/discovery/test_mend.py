"""A capture says the same, however it was quoted, logged, numbered, coloured, escaped, marked up or indented."""

import json
import re
from pathlib import Path

import pytest

from dynctl.discovery.capture import Capture, read_captures
from dynctl.discovery.mend import mend
from dynctl.discovery.view import document

CASES = sorted((Path(__file__).parent / "cases").glob("*/*/stdout.txt"))
SHARE = 4
"""Every style meets every fourth capture; the styles after it meet the others."""


def each_line(change):
    return lambda text: "\n".join(change(i, line) for i, line in enumerate(text.split("\n"), 1))


def before(prefix):
    return each_line(lambda _, line: prefix + line)


STYLES = {
    "indented": before("    "),
    "indented by a tab": before("\t"),
    "quoted": before("> "),
    "quoted twice": before("> > "),
    "commented": before("# "),
    "commented in C": before("// "),
    "behind a bar": before("\u2502 "),
    "added in a diff": before("+"),
    "numbered by cat": each_line(lambda i, line: f"{i:6d}\t{line}"),
    "numbered by grep": each_line(lambda i, line: f"{i}:{line}"),
    "numbered as a list": each_line(lambda i, line: f"{i}. {line}"),
    "dated": before("2025-03-04T11:22:33.123456Z "),
    "dated in brackets": before("[2025-03-04 11:22:33] "),
    "dated by kubelet": before("2025-03-04T11:22:33.1Z stdout F "),
    "logged by Python": before("2025-03-04 11:22:33,123 INFO "),
    "logged by vLLM": before("INFO 03-04 11:22:33 [env.py:190] "),
    "logged by glog": before("I0304 11:22:33.123456 4711 x.cc:12] "),
    "logged by syslog": before("Mar  4 11:22:33 node7 topo[4711]: "),
    "logged by Ray": before("(Worker pid=4711, ip=10.1.2.3) "),
    "from a host": before("node07: "),
    "from a task": before("0: "),
    "from a pod": before("[pod/x-0/main] "),
    "from a container": before("vllm-1  | "),
    "from a rank": before("[1,0]<stdout>:"),
    "coloured": each_line(lambda _, line: f"\x1b[32m{line}\x1b[0m"),
    "coloured, carets": each_line(lambda _, line: f"^[[4m{line}^[[0m"),
    "coloured, octal": each_line(lambda _, line: f"\\033[4m{line}\\033[0m"),
    "coloured, escapes lost": each_line(lambda i, line: f"[1m{line}[0m" if i < 4 else line),
    "erased to the end": each_line(lambda _, line: line + "\x1b[K"),
    "pasted in brackets": lambda text: f"\x1b[?2004l\r{text}\x1b[?2004h",
    "in HTML": lambda text: f"<pre><code>{text}</code></pre>",
    "with entities": lambda text: text.replace("&", "&amp;").replace("<", "&lt;"),
    "with line ends of DOS": lambda text: text.replace("\n", "\r\n"),
    "with line ends doubled": lambda text: text.replace("\n", "\r\r\n"),
    "with line ends of old": lambda text: text.replace("\n", "\r"),
    "with hard spaces": lambda text: text.replace(" ", "\u00a0"),
    "with wide spaces": lambda text: text.replace(" ", "\u3000"),
    "with spaces of no width": lambda text: text.replace("\t", "\t\u200b"),
    "with a byte order mark": lambda text: "\ufeff" + text,
    "with tabs expanded": lambda text: text.expandtabs(8),
    "with escapes": lambda text: json.dumps(text)[1:-1],
    "as a string of Python": repr,
    "in JSON": lambda text: json.dumps({"command": "x", "lines": text.split("\n")}, indent=1),
    "logged by Docker": each_line(lambda _, line: json.dumps({"log": line + "\n", "stream": "x"})),
    "with spaces behind": each_line(lambda _, line: line + " " * 60),
    "without spaces behind": each_line(lambda _, line: line.rstrip()),
    "with blank lines": lambda text: text.replace("\n", "\n\n"),
    "without blank lines": lambda text: re.sub(r"\n\s*\n+", "\n", text),
}


def facts(text):
    topology, _ = read_captures([Capture("host.txt", text.encode())])
    return document(topology)["hosts"]


@pytest.fixture(scope="module")
def plain():
    return {path: facts(path.read_text()) for path in CASES}


def is_one_line(path):
    """A prefix before one line alone may as well be of it."""
    return path.read_text().strip().count("\n") < 2


def counts_lines(path):
    """A list of exactly ten lines is taken for one that `head` cut."""
    return "mig" in path.parent.name


@pytest.mark.parametrize(("number", "name"), list(enumerate(STYLES)), ids=list(STYLES))
def test_a_style_changes_nothing(plain, number, name):
    for path in CASES[number % SHARE :: SHARE]:
        if not is_one_line(path) and not counts_lines(path):
            assert facts(STYLES[name](path.read_text())) == plain[path], path.parent.name


def test_utf_16_is_read():
    assert mend("\tGPU0\nGPU0\t X \n".encode("utf-16")) == "\tGPU0\nGPU0\t X \n"


def test_a_literal_of_a_program_is_read():
    text = '    text := "\\tGPU0\\tGPU1\\n" +\n        "GPU0\\t X \\tNV4\\n" +\n        "GPU1\\tNV4\\t X \\n"\n'

    assert mend(text.encode()) == "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X "


@pytest.mark.parametrize(
    "text",
    [
        "GPU 0: NVIDIA L4 (UUID: x)\nGPU 1: NVIDIA L4 (UUID: y)\nGPU 2: NVIDIA L4 (UUID: z)",
        "01:00.0 3D controller: NVIDIA\n02:00.0 3D controller: NVIDIA\n03:00.0 Ethernet: Mellanox",
        "0, GPU-1, L4\n1, GPU-2, L4\n2, GPU-3, L4\n3, GPU-4, L4",
        "mlx5_0 port 1 ==> ib0 (Up)\nmlx5_1 port 1 ==> ib1 (Up)\nmlx5_2 port 1 ==> ib2 (Up)",
        "link mlx5_0/1 state ACTIVE\nlink mlx5_0/2 state DOWN\nlink mlx5_1/1 state ACTIVE",
        "0/1: mlx5_0/1: state ACTIVE\n1/1: mlx5_1/1: state ACTIVE\n2/1: mlx5_2/1: state DOWN",
        "GPU0\t X \tNV4\nGPU1\tNV4\t X \nGPU2\tSYS\tSYS",
        "GPU[0]\t\t: (Topology) Numa Node: 0\nGPU[0]\t\t: (Topology) Numa Affinity: 0\nGPU[0]\t\t: x",
        "| 0  A | x |\n|  1 B | y |\n| 2  C | z |",
        "+----+\n| 0  |\n+----+\n| 1  |\n+----+",
    ],
)
def test_what_tools_begin_their_lines_with_is_no_prefix(text):
    assert mend(text.encode()) == text
