"""The ledger. It is empty at first: what was used before is only known by periods, which have no gaps."""

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Integer, Text
from sqlalchemy.dialects import sqlite
from sqlalchemy.types import TypeEngine

revision = "0009"
down_revision = "0008"

_KEY = Text().with_variant(Text(collation="C"), "postgresql")
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
_FIGURE: TypeEngine[float] = Double().with_variant(sqlite.REAL(), "sqlite")


def upgrade() -> None:
    """Make the table, in either engine."""
    op.create_table(
        "ledger",
        Column("job_id", _KEY, primary_key=True),
        Column("deletion", _NUMBER, primary_key=True, autoincrement=False),
        Column("run_number", _NUMBER, primary_key=True, autoincrement=False),
        Column("hour", _NUMBER, primary_key=True, autoincrement=False),
        Column("baseline_number", _NUMBER, primary_key=True, autoincrement=False),
        Column("baseline_iteration_count", _NUMBER, nullable=False),
        Column("baseline_energy_j", _FIGURE, nullable=False),
        Column("baseline_energy_m2", _FIGURE, nullable=False),
        Column("price_per_kwh", _FIGURE),
        Column("intensity_g_per_kwh", _FIGURE),
        Column("iteration_count", _NUMBER, nullable=False),
        Column("unmeasured_count", _NUMBER, nullable=False),
        Column("time_s", _FIGURE, nullable=False),
        Column("stock_energy_j", _FIGURE, nullable=False),
        Column("uncompared_energy_j", _FIGURE, nullable=False),
        Column("compared_count", _NUMBER, nullable=False),
        Column("compared_energy_j", _FIGURE, nullable=False),
        Column("energy_m2", _FIGURE, nullable=False),
        Column("freedom_count", _NUMBER, nullable=False),
        Column("profiling_count", _NUMBER, nullable=False),
        Column("profiling_energy_j", _FIGURE, nullable=False),
        Column("straggler_energy_j", _FIGURE, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("ledger_by_hour", "ledger", ["hour"])
