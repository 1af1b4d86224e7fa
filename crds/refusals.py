"""Turns what pydantic refuses into one sentence for a person: where in the resource, what is wrong, what is allowed.

For statuses, Events and the command line; values are quoted only when they are short.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

_SHOWN = 3  # errors named in one sentence
_MESSAGE_LIMIT = 1024


def explain_refusal(error: ValidationError, root: str) -> str:
    """`root.path: reason; ...` for the first few errors, most specific paths, at most 1 KiB."""
    seen: dict[str, str] = {}
    errors = error.errors(include_url=False, include_context=True, include_input=True)
    for item in errors:
        path = _path(root, item["loc"])
        seen.setdefault(path, _reason(item["type"], item.get("ctx") or {}, item["msg"], item.get("input")))
    parts = [f"{path}: {reason}" for path, reason in list(seen.items())[:_SHOWN]]
    if len(seen) > _SHOWN:
        parts.append(f"and {len(seen) - _SHOWN} more")
    text = "; ".join(parts)
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 1] + "…"


def _path(root: str, loc: tuple[int | str, ...]) -> str:
    path = root
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part == "[key]" or part.startswith(("constrained-", "function-", "literal[")) or part in ("str", "int"):
            continue  # pydantic's names for branches of a union, not fields of the resource
        else:
            path += f".{part[:64]}"
    return path


def _reason(kind: str, ctx: dict[str, Any], message: str, value: object) -> str:
    shown = f", not {_show(value)}" if _show(value) else ""
    match kind:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not a field that berth knows"
        case "greater_than_equal":
            return f"must be at least {ctx.get('ge')}{shown}"
        case "less_than_equal":
            return f"must be at most {ctx.get('le')}{shown}"
        case "string_too_short" | "too_short":
            return f"must have at least {ctx.get('min_length')} {_unit(kind)}"
        case "string_too_long" | "too_long":
            return f"must have at most {ctx.get('max_length')} {_unit(kind)}"
        case "string_pattern_mismatch":
            return f"must match {ctx.get('pattern')}{shown}"
        case "literal_error":
            return f"must be {ctx.get('expected')}{shown}"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"must be an integer{shown}"
        case "float_type":
            return f"must be a number{shown}"
        case "string_type":
            return f"must be a string{shown}"
        case "bool_type":
            return f"must be true or false{shown}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "must be an object"
        case "list_type":
            return "must be a list"
        case "value_error":
            return message.removeprefix("Value error, ")
    return message[:200]


def _unit(kind: str) -> str:
    return "characters" if kind.startswith("string") else "entries"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | str):
        text = repr(value) if isinstance(value, str) else str(value)
        return text if len(text) <= 64 else ""
    return ""
