"""Runs under another environment's Python: asks AIConfigurator what it thinks of layouts. dynctl never imports it.

One JSON object comes in on stdin, `{"questions": [{"id": …, "call": {…}}, …]}`; one goes out on stdout,
`{"predictor": "aiconfigurator 0.12.0", "answers": {id: {…}}}`, or `{"fatal": "…"}` when the library cannot be used. What
the library prints goes to stderr. It knows nothing of dynctl, so that any environment can run it.
IO: stdin, stdout; the library reads its own tables and model directories.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer every question; one that fails costs no other its answer."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    try:
        from importlib.metadata import version

        from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

        name = f"aiconfigurator {version('aiconfigurator')}"
    except Exception as error:  # noqa: BLE001 - whatever keeps it from being used is the answer
        json.dump({"fatal": _text(error)}, out)
    else:
        answers = {q["id"]: _answer(cli_estimate, q["call"]) for q in asked["questions"]}
        json.dump({"predictor": name, "answers": answers}, out)
    out.close()


def _answer(cli_estimate: Callable[..., Any], call: dict[str, Any]) -> dict[str, Any]:
    try:
        found = cli_estimate(**call)
        return {
            "ttft_ms": float(found.ttft),
            "tpot_ms": float(found.tpot),
            "out_tok_s_per_gpu": float(found.tokens_per_second_per_gpu),
            "engine": f"{call['backend_name']} {found.backend_version}",
        }
    except Exception as error:  # noqa: BLE001 - the library raises many kinds; each is the answer to one question
        return {"error": _text(error)}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    main()
