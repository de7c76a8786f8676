"""Structured logs of long-running commands, on standard error: one event per line, with named values."""

import logging
import sys
from typing import Literal

import structlog

from perseus.printable import printable

_MANY_LINES = ("exception", "stack")

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]


def configure(level: LogLevel, log_format: LogFormat) -> None:
    """Send log lines of this process from `level` up to standard error."""
    renderer: structlog.types.Processor
    processors: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer(sort_keys=True)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        processors.append(escape)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def escape(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Escape unprintable characters in a line for people, which may quote others; keep traceback lines."""
    for name, value in event.items():
        if name in _MANY_LINES:
            event[name] = "\n".join(printable(line) for line in str(value).split("\n"))
        elif isinstance(value, str):
            event[name] = printable(value)
    return event
