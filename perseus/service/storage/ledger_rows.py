"""The ledger's rows: written by the hour, read in sums, and kept when their job is deleted."""

from dataclasses import astuple, fields
from itertools import groupby, islice
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, case, func, literal, or_, select, true, update

from perseus.service.domain.ledger import (
    NO_BASELINE,
    EnergyGroup,
    EnergyHour,
    EnergySums,
    HourFilter,
    Rates,
    Reference,
    WeightedSums,
)
from perseus.service.storage import schema
from perseus.service.storage.codecs import figure, integer

_SUMS = tuple(each.name for each in fields(EnergySums))
_COLUMNS = schema.ledger.c
_REFERENCE = (
    _COLUMNS.baseline_number,
    _COLUMNS.baseline_iteration_count,
    _COLUMNS.baseline_energy_j,
    _COLUMNS.baseline_energy_m2,
)
_ENERGY_J = _COLUMNS.stock_energy_j + _COLUMNS.uncompared_energy_j + _COLUMNS.compared_energy_j
_WEIGHTED = {"cost": _COLUMNS.price_per_kwh, "carbon": _COLUMNS.intensity_g_per_kwh}


def row_of(job_id: str, run_number: int, hour: EnergyHour) -> tuple[Any, ...]:
    """Return the row of an hour, in the order of the table's columns.

    Raises:
        UnstorableError: a number is not finite, or a count exceeds 64 bits.
    """
    reference = hour.reference or Reference(
        number=NO_BASELINE, iteration_count=0, energy_j=0.0, energy_m2=0.0
    )
    price, intensity = astuple(hour.rates)
    sums = [
        integer(f"ledger.{name}", value) if isinstance(value, int) else figure(f"ledger.{name}", value)
        for name, value in zip(_SUMS, astuple(hour.sums), strict=True)
    ]
    return (
        job_id,
        0,
        run_number,
        hour.hour,
        reference.number,
        reference.iteration_count,
        figure("ledger.baseline_energy_j", reference.energy_j),
        figure("ledger.baseline_energy_m2", reference.energy_m2),
        price,
        intensity,
        *sums,
    )


def latest_hour(connection: Connection, job_id: str, run_number: int) -> EnergyHour | None:
    """Return the hour that an existing job's run has last counted in."""
    row = connection.execute(
        select(schema.ledger)
        .where(_COLUMNS.job_id == job_id, _COLUMNS.deletion == 0, _COLUMNS.run_number == run_number)
        .order_by(_COLUMNS.hour.desc(), _COLUMNS.baseline_number.desc())
        .limit(1)
    ).first()
    if row is None:
        return None
    return EnergyHour(row.hour, _reference(row), _sums(row), _rates(row))


def groups(connection: Connection, wanted: HourFilter) -> list[EnergyGroup]:
    """Return the sums over the wanted hours, by job, deletion, run and baseline.

    Of the jobs of one name, the existing one comes last.
    """
    run = (_COLUMNS.job_id, _COLUMNS.deletion, _COLUMNS.run_number)
    is_wanted = [
        _COLUMNS.hour >= wanted.first_hour if wanted.first_hour is not None else true(),
        _COLUMNS.hour < wanted.end_hour if wanted.end_hour is not None else true(),
        _COLUMNS.job_id == wanted.job_id if wanted.job_id else true(),
    ]
    rows = connection.execute(
        select(
            *run,
            *_REFERENCE,
            func.min(_COLUMNS.hour).label("first_hour"),
            func.max(_COLUMNS.hour).label("last_hour"),
            *(func.sum(_COLUMNS[name]).label(name) for name in _SUMS),
            *(each for name, rate in _WEIGHTED.items() for each in _weighted_columns(name, rate)),
        )
        .where(*is_wanted, *_after(connection, wanted, is_wanted))
        .group_by(*run, *_REFERENCE)
        .order_by(_COLUMNS.job_id, _COLUMNS.deletion == 0, *run[1:], *_REFERENCE, func.min(_COLUMNS.hour))
    )
    runs = groupby(rows, lambda row: (row.job_id, row.deletion, row.run_number))
    return [
        EnergyGroup(
            row.job_id,
            deletion=row.deletion,
            run_number=row.run_number,
            first_hour=row.first_hour,
            last_hour=row.last_hour,
            reference=_reference(row),
            sums=_sums(row),
            cost=_weighted_sums("cost", row),
            carbon=_weighted_sums("carbon", row),
        )
        for _, of_run in islice(runs, None if wanted.after is None else wanted.run_count)
        for row in of_run
    ]


def _after(connection: Connection, wanted: HourFilter, is_wanted: list[ColumnElement[bool]]) -> list[Any]:
    """Return the conditions for the rows of the next runs after one; for more, if the last job has more.

    They bound the jobs, which are the beginning of the key, so most of the ledger is not read.
    """
    if wanted.after is None:
        return []
    job_id, deletion, run_number = wanted.after
    is_later = and_(_COLUMNS.deletion == deletion, _COLUMNS.run_number > run_number)
    if deletion:
        is_later = or_(is_later, _COLUMNS.deletion > deletion, _COLUMNS.deletion == 0)
    conditions = [_COLUMNS.job_id >= job_id, or_(_COLUMNS.job_id > job_id, is_later)]
    jobs = select(_COLUMNS.job_id).distinct().where(*is_wanted, *conditions)
    of_page = jobs.order_by(_COLUMNS.job_id).limit(wanted.run_count).subquery()
    last = connection.scalar(select(func.coalesce(func.max(of_page.c.job_id), "")))
    return [*conditions, _COLUMNS.job_id <= last]


def _weighted_columns(name: str, rate: ColumnElement[Any]) -> list[ColumnElement[Any]]:
    """The columns of `WeightedSums`; SQL's sums skip the hours whose rate is NULL."""
    count, energy_j = _COLUMNS.compared_count, _COLUMNS.compared_energy_j
    is_unknown = rate.is_(None)
    terms = {
        "energy": rate * _ENERGY_J,
        "compared_count": rate * count,
        "compared_energy": rate * energy_j,
        "compared_square": rate * rate * count,
        "unknown_hours": case((is_unknown, 1), else_=0),
        "unknown_energy_j": case((is_unknown, _ENERGY_J), else_=0.0),
        "unknown_compared_count": case((is_unknown, count), else_=0),
        "unknown_compared_energy_j": case((is_unknown, energy_j), else_=0.0),
    }
    return [func.coalesce(func.sum(term), 0).label(f"{name}_{each}") for each, term in terms.items()]


def _weighted_sums(name: str, row: Row[Any]) -> WeightedSums:
    return WeightedSums(
        **{each.name: _number(getattr(row, f"{name}_{each.name}")) for each in fields(WeightedSums)}
    )


def archive_rows(connection: Connection, job_id: str) -> None:
    """Keep a deleted job's rows under a new deletion number, to make room for another job of its name."""
    of_job = _COLUMNS.job_id == job_id
    deletion = connection.scalar(select(func.max(_COLUMNS.deletion)).where(of_job)) or 0
    connection.execute(
        update(schema.ledger).where(of_job, _COLUMNS.deletion == 0).values(deletion=literal(deletion + 1))
    )


def _reference(row: Row[Any]) -> Reference | None:
    if row.baseline_number == NO_BASELINE:
        return None
    return Reference(
        number=row.baseline_number,
        iteration_count=row.baseline_iteration_count,
        energy_j=row.baseline_energy_j,
        energy_m2=row.baseline_energy_m2,
    )


def _rates(row: Row[Any]) -> Rates:
    return Rates(row.price_per_kwh, row.intensity_g_per_kwh)


def _sums(row: Row[Any]) -> EnergySums:
    return EnergySums(**{name: _number(getattr(row, name)) for name in _SUMS})


def _number(value: Any) -> Any:
    """Return a sum as a Python number; PostgreSQL adds whole numbers up to decimals."""
    return value if isinstance(value, float) else int(value)
