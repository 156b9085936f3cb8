"""A model's chat template: messages → the prompt's text, the way the engine renders it.

Templates come with models, so they run in jinja2's immutable sandbox. Not here: files, tokens. IO: a watchdog thread.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynctl.errors import RouterError

# A template that walks over the parts of a message wants them as a list; others want text.
# vLLM decides the same by the template's syntax tree.
_WALKS_PARTS = re.compile(
    r"for\s+\w+\s+in\s+(?:message|msg|m)(?:\.content|\[\s*['\"]content['\"]\s*\])"
)


_MAX_STEPS = 200_000
"""Turns of loops and calls of one rendering: some 50 ms. A conversation of 1,000 messages takes a few thousand."""

_BUDGET = "steps left"
"""No name a template can write."""

_MAX_PRODUCT = 1_000_000
_MAX_EXPONENT = 64


class _Generation(jinja2.ext.Extension):
    """The `{% generation %}` block marks assistant text for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Budget:
    """Steps one rendering may still take; it finds it among its variables."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _MAX_STEPS

    def spend(self, number: int = 1) -> None:
        self.left -= number
        if self.left < 0:
            raise jinja2.TemplateError("the template takes more steps than any sound one")


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox in which turns of loops, calls, and what `*` and `**` make are counted, so that no template runs for ever."""

    intercepted_binops = frozenset(("*", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Let every loop draw from the budget."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "counted_turns", [], [], None, None)
        return tree

    def call(self, context: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - jinja2's signature
        """Count calls: macros may call themselves."""
        context.parent[_BUDGET].spend()
        return super().call(context, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - jinja2's signature
        """Refuse products no prompt needs before they are made."""
        sizes = [
            len(side) if isinstance(side, str | bytes | list | tuple) else abs(side)
            for side in (left, right)
            if isinstance(side, str | bytes | list | tuple | int | float)
        ]
        is_large = len(sizes) == 2 and (
            sizes[0] * sizes[1] > _MAX_PRODUCT if operator == "*" else sizes[1] > _MAX_EXPONENT
        )
        if is_large:
            raise jinja2.TemplateError("the template makes more than any sound one")
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _counted_turns(context: jinja2.runtime.Context, values: Iterable[Any]) -> Iterator[Any]:
    return _count(context.parent[_BUDGET], iter(values))


def _count(budget: _Budget, values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        budget.spend()
        yield value


class ChatTemplate:
    """One compiled template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Raises:
            RouterError: when the template is malformed.
        """
        environment = _Bounded(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.filters["counted_turns"] = _counted_turns
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RouterError(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._wants_parts = _WALKS_PARTS.search(source) is not None

    def render(self, body: Mapping[str, Any]) -> str | None:
        """Render a chat request's messages; None where the text cannot be known here.

        That is: content that is not text, options that change the prompt in ways of the engine's own, and
        messages the template refuses (the engine then says so itself).
        """
        if any(body.get(name) for name in _UNKNOWABLE):
            return None
        messages = _normalised(body["messages"], wants_parts=self._wants_parts)
        if messages is None:
            return None
        options: dict[str, Any] = dict(self._special_tokens)
        if body.get("reasoning_effort") is not None:
            options["reasoning_effort"] = body["reasoning_effort"]
        try:
            options |= body.get("chat_template_kwargs") or {}
            options[_BUDGET] = _Budget()
            return self._template.render(
                messages=messages,
                tools=body.get("tools") or None,
                documents=body.get("documents"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                **options,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ):
            return None


_UNKNOWABLE = ("continue_final_message", "truncate_prompt_tokens", "prompt_embeds")


def _normalised(messages: Sequence[Any], *, wants_parts: bool) -> list[dict[str, Any]] | None:
    """Bring messages to the shape the engine gives its template; None when one holds more than text."""
    found = []
    for message in messages:
        normal = dict(message)
        content = message.get("content")
        if isinstance(content, list):
            texts = [_part_text(part) for part in content]
            if None in texts:
                return None
            content = "\n".join(text for text in texts if text is not None)
            if wants_parts:
                content = [{"type": "text", "text": text} for text in texts]
        elif isinstance(content, str) and wants_parts:
            content = [{"type": "text", "text": content}]
        normal["content"] = content
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            normal["tool_calls"] = [_call_with_arguments(call) for call in calls]
        found.append(normal)
    return found


def _part_text(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in {"text", "input_text", "output_text"}:
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def _call_with_arguments(call: Any) -> Any:  # noqa: ANN401 - a client's JSON
    """Turn a tool call's arguments from JSON text into values, as engines do for their templates."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}


def _tojson(
    value: Any,  # noqa: ANN401 - whatever a template holds
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the local day, as engines do
