"""Small programs that run on hosts: each is sent whole to `python -` over SSH and uses the standard library only.

Arguments arrive as one JSON object, the answer is one JSON object on stdout. They are also importable, for tests.
"""

from importlib import resources

from dynctl.core.command import Command


def program(name: str, python: str, arguments: bytes, timeout_s: float) -> Command:
    """The command that runs one of these programs: the source on stdin, its JSON arguments in argv.

    Arguments carry names, paths and numbers only; secrets travel as files.
    """
    source = resources.files(__name__).joinpath(f"{name}.py").read_bytes()
    return Command((python, "-sP", "-", arguments.decode()), stdin=source, timeout_s=timeout_s)
