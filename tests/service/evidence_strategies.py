"""Evidence of every class, made of any values that its fields may have."""

import enum
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from perseus.service.domain.events import Happening, JobEvent
from perseus.service.domain.evidence import EVIDENCE, Evidence, PipelineClocks, StragglerReported
from perseus.service.domain.model import EventType
from perseus.service.domain.specification import BudgetTerms, Deadline, OperatingPolicy

CLASSES: tuple[type[Evidence], ...] = get_args(Evidence)

_INT32 = st.integers(0, 2**31 - 1)
_INT64 = st.integers(-1, 2**63 - 1)
_WIDE = {"version", "start_iteration", "iteration", "last_iteration", "plan_versions"}
"""Fields of 64 bits."""

_FLOATS = st.floats(allow_nan=False)
_TIMES = st.floats(1e9, 4e9)
_TEXTS = st.text(st.characters(codec="utf-8"))
_MESSAGES = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
_TERMS = st.none() | st.builds(BudgetTerms, _FLOATS, _FLOATS)
_POLICIES = st.one_of(
    st.builds(OperatingPolicy, max_slowdown_percent=_FLOATS, budget_terms=_TERMS),
    st.builds(OperatingPolicy, deadline=st.builds(Deadline, _INT64, _FLOATS), budget_terms=_TERMS),
    st.builds(OperatingPolicy, max_average_power_w=_FLOATS, budget_terms=_TERMS),
)


def values(kind: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Return what a field of this type and name may hold."""
    if kind is OperatingPolicy:
        return _POLICIES
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        parts = {field.name: values(hints[field.name], field.name) for field in fields(kind)}
        return st.builds(kind, **parts).filter(_is_possible)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0], name), max_size=4).map(tuple)
    if get_origin(kind) is UnionType:
        return st.one_of(*(values(part, name) for part in get_args(kind)))
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return {
        int: _INT64 if name in _WIDE else _INT32,
        float: _TIMES if name == "since_time_s" else _FLOATS,
        str: _TEXTS,
        bool: st.booleans(),
        type(None): st.none(),
    }[kind]


def _is_possible(value: object) -> bool:
    """Of some fields at most one is set."""
    match value:
        case PipelineClocks():
            return value.held_clocks_mhz is None or value.plan is None
        case StragglerReported():
            return value.iteration_time_s is None or value.slowdown_factor is None
    return True


def events(kind: EventType) -> st.SearchStrategy[JobEvent]:
    """Return events of a type, with any evidence that goes with it."""
    evidence = values(EVIDENCE[kind]) if kind in EVIDENCE else st.none()
    happening = st.builds(Happening, st.integers(1, 2**63 - 1), st.just(kind), _MESSAGES, evidence)
    return st.builds(JobEvent, st.just("job"), st.just(1), st.floats(1e9, 4e9), happening)
