"""A model by directory, `config.json` or the name of a shape that ships with dynctl. IO: reads files."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dynctl.core.model import Model
from dynctl.core.text import clean
from dynctl.errors import PlanError
from dynctl.planner.model import Config, model_of_files, read_model
from dynctl.planner.names import alike, quantised, recognise, unreadable_format

MAX_CONFIG_BYTES = 4 * 1024**2
MAX_INDEX_BYTES = 64 * 1024**2


@cache
def _shapes() -> Mapping[str, Any]:
    text = resources.files("dynctl.planner").joinpath("shapes.json").read_text("utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def shipped_names() -> tuple[str, ...]:
    """Names of the models whose shape ships with dynctl."""
    return tuple(_shapes())


def shipped_config(name: str) -> Mapping[str, Any]:
    """The slim `config.json` of a shipped shape; KeyError when there is none of that name."""
    found: Mapping[str, Any] = _shapes()[name]
    return found


def open_model(
    where: str,
    kv_dtype_bytes: float | None = 2.0,
    shape: Mapping[str, float] | None = None,
    weights: str = "",
) -> Model:
    """Read a model from a directory, from a `config.json`, or by a published name whose shape ships.

    `weights` is a key of `names.FORMATS` that goes before what the name or the file says.

    Raises:
        PlanError: when there is none, or it cannot be read; says what is missing.
    """
    path = Path(where)
    if path.is_dir():
        return _from_directory(path, kv_dtype_bytes, shape, weights)
    if path.is_file():
        config = _stored(_json(path, MAX_CONFIG_BYTES), weights)
        return read_model(config, where, kv_dtype_bytes, shape)
    named = recognise(where, _shapes())
    unreadable = unreadable_format(where)
    if unreadable:
        raise PlanError(
            f"model {clean(where)}: {unreadable} files are for single machines, and engines here do not serve them",
            "take a checkpoint in bf16, fp8, int4 (awq, gptq), mxfp4 or nvfp4",
        )
    if named is None:
        raise _unknown(where)
    stored = weights or named.weights
    config = _stored(_shapes()[named.shape], stored, named.has_small_cache)
    found = read_model(config, named.shape, kv_dtype_bytes, shape)
    is_own = named.shape == where and not weights
    said = f"config.json of {named.shape}" + (f", weights in {stored}" if stored else "")
    return found if is_own else replace(found, source=said)


def _stored(config: Config, weights: str, has_small_cache: bool = False) -> Config:
    return quantised(config, weights, has_small_cache) if weights else config


def _unknown(where: str) -> PlanError:
    names = shipped_names()
    like = alike(where, names)
    return PlanError(
        f"model {clean(where)}: no such directory or config.json, and no shape of that name ships with dynctl",
        (f"did you mean {' or '.join(like)}? " if like else "")
        + f"give a path, or one of: {', '.join(names)}",
    )


def _from_directory(
    path: Path, kv_dtype_bytes: float | None, shape: Mapping[str, float] | None, weights: str
) -> Model:
    # The index weighs what is stored, which is not what is asked about.
    total = index_bytes(path) if not weights else None
    config = path / "config.json"
    if config.is_file():
        try:
            found = _stored(_json(config, MAX_CONFIG_BYTES), weights)
            return read_model(found, str(path), kv_dtype_bytes, shape, total)
        except PlanError:
            if not shape or total is None:
                raise
    return model_of_files(str(path), total or 0, shape or {})


def index_bytes(path: Path) -> int | None:
    """Bytes of a checkpoint's weights: `total_size` of its safetensors index, else the files' sizes; None: no weights."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        metadata = _json(index, MAX_INDEX_BYTES).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
        if isinstance(total, int) and total > 0:
            return total
    sizes = [file.stat().st_size for file in sorted(path.glob("*.safetensors"))]
    return sum(sizes) or None


def _json(path: Path, max_bytes: int) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
        if len(content) > max_bytes:
            raise PlanError(
                f"{clean(str(path))} is larger than {max_bytes} bytes", "is it the right file?"
            )
        found = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(
            f"{clean(str(path))} cannot be read: {clean(str(error), 200)}",
            "give the model's own files",
        ) from error
    if not isinstance(found, Mapping):
        raise PlanError(
            f"{clean(str(path))} holds no JSON object", "give the model's own config.json"
        )
    return found
