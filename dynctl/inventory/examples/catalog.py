"""The examples by name. IO: files of this package."""

from importlib.resources import files


def example_names() -> list[str]:
    """List the examples, the plainest first."""
    found = [item.name for item in files("dynctl.inventory.examples").iterdir()]
    names = sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))
    return sorted(names, key=lambda name: (name != "local", name))


def example_text(name: str) -> str:
    """Return an example's text."""
    return files("dynctl.inventory.examples").joinpath(f"{name}.yaml").read_text("utf-8")
