"""Structured logs of long-running commands, on standard error: one event per line, with named values."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import structlog

from perseus.printable import os_error_text, printable

log = structlog.get_logger(__name__)

_MANY_LINES = ("exception", "stack")
_IN_LOG = "its cause is in the log"

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


@contextmanager
def exiting(codes: Mapping[type[Exception], int]) -> Iterator[None]:
    """Log the error that ends this process, and exit with the code of its type, or 1."""
    try:
        yield
    except ModuleNotFoundError:
        raise  # the command line names what to install
    except Exception as error:
        log_end(error, *codes)
        raise SystemExit(next((codes[kind] for kind in codes if isinstance(error, kind)), 1)) from None


def log_end(error: Exception, *foreseen: type[Exception]) -> None:
    """Log the error that ends this process, once: as soon as it is noticed, or when it leaves `exiting`.

    Those that are not `foreseen` are logged with their traceback.
    """
    if _IN_LOG in getattr(error, "__notes__", ()):
        return
    cause = os_error_text(error) if isinstance(error, OSError) else str(error)
    log.critical("ends with an error", cause=cause, exc_info=not isinstance(error, foreseen))
    error.add_note(_IN_LOG)


def escape(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Escape unprintable characters in a line for people, which may quote others; keep traceback lines."""
    for name, value in event.items():
        if name in _MANY_LINES:
            event[name] = "\n".join(printable(line) for line in str(value).split("\n"))
        elif isinstance(value, str):
            event[name] = printable(value)
    return event
