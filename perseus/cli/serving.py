"""`perseus serving`: the inference engines that this node's agent controls, and what that saves."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perseus.agent.link.address import DEFAULT_SOCKET_PATH, SOCKET_VARIABLE
from perseus.cli.rows import Format, FormatOption, show_row, show_rows
from perseus.cli.terminal import FAILURE, did_you_mean, fail
from perseus.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    help="Show inference engines whose clocks this node's agent sets, and what that saves.",
    no_args_is_help=True,
)

Row = Mapping[str, Any]
SocketOption = Annotated[
    Path | None,
    typer.Option(
        help=f"Socket of the agent; by default ${SOCKET_VARIABLE}, or {DEFAULT_SOCKET_PATH}.",
        show_default=False,
    ),
]
NameArgument = Annotated[str, typer.Argument(help="The instance's name in the agent's configuration.")]


@app.command("list")
def list_(socket: SocketOption = None, form: FormatOption = Format.TABLE) -> None:
    """List all instances: state, clock, load and power."""
    rows = _ask(socket)
    show_rows(form, rows, _COLUMNS, lambda: _overview(rows))


@app.command()
def show(name: NameArgument, socket: SocketOption = None, form: FormatOption = Format.TABLE) -> None:
    """Show one instance: its settings, its state, and the prediction for every clock."""
    row = _find(_ask(socket), name)
    show_row(form, row, lambda: [_facts(row), _clocks(row)])


@app.command()
def report(name: NameArgument, socket: SocketOption = None, form: FormatOption = Format.TABLE) -> None:
    """Report an instance's measured energy per token against stock, and how sure that is."""
    row = _find(_ask(socket), name)
    show_row(form, {"name": row["name"], **row["savings"]}, lambda: [_report(row)])


_COLUMNS = (
    "name", "state", "reason", "clock_mhz", "running_count", "waiting_count", "power_w", "tokens_per_s"
)  # fmt: skip


def _ask(socket: Path | None) -> Sequence[Row]:
    from perseus.agent.link.packets import MalformedPacket
    from perseus.agent.sidecar.health_client import ask_instances

    path = socket or Path(os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET_PATH))
    try:
        return ask_instances(path, timeout_s=5.0)
    except (OSError, MalformedPacket) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        fail(f"no agent at {path}: {reason}", FAILURE)


def _find(rows: Sequence[Row], name: str) -> Row:
    found = {row["name"]: row for row in rows}
    if name not in found:
        expected = f"expected one of the agent's instances ({', '.join(found) or 'none'})"
        fail(f"NAME: {expected}, found {name!r}{did_you_mean(name, found)}")
    return found[name]


def _overview(rows: Sequence[Row]) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("instance", "state", "clock", "running", "waiting", "power", "tokens/s"):
        table.add_column(column, justify="left" if column in ("instance", "state") else "right")
    for row in rows:
        table.add_row(
            row["name"],
            _state(row),
            _text(row["clock_mhz"], "{} MHz"),
            _text(row["running_count"], "{}"),
            _text(row["waiting_count"], "{}"),
            _text(row["power_w"], "{:.0f} W"),
            _text(row["tokens_per_s"], "{:.0f}"),
        )
    return table


def _state(row: Row) -> str:
    return printable(f"{row['state']}: {row['reason']}" if row["reason"] else row["state"])


def _facts(row: Row) -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in {
        "instance": row["name"],
        "state": _state(row),
        "GPUs": f"{', '.join(row['gpus'])} of user {row['user']}",
        "objectives": f"TTFT {row['ttft']}, ITL {row['itl']}",
        "statistics": row["source"],
        "clock": _text(row["clock_mhz"], "{} MHz") or "stock",
        "load": f"{_text(row['running_count'], '{} running')}, {_text(row['waiting_count'], '{} waiting')}, "
        f"{_text(row['tokens_per_s'], '{:.0f} tokens/s')}, {_text(row['power_w'], '{:.0f} W')}",
        "learned": f"{_text(row['time_scale'], 'step times {:.2f} × the profile')}",
    }.items():
        table.add_row(name, printable(str(value)).strip(", "))
    return table


def _clocks(row: Row) -> "Table":
    from rich.table import Table

    table = Table(title="Predicted under the load of the last minutes")
    for column in ("clock, MHz", "power, W", "late TTFT, at most", "late ITL, at most"):
        table.add_column(column, justify="right")
    for each in row["clocks"]:
        shares = (f"{100 * each[name]:.2f} %" for name in ("late_ttft_share", "late_itl_share"))
        table.add_row(f"{each['clock_mhz']}", f"{each['power_w']:.0f}", *shares)
    return table


def _report(row: Row) -> "Table":
    from rich.table import Table

    savings = row["savings"]
    if savings["saving"] is None:
        saving = f"not known before {savings['useful_after_h']:.1f} h of control"
    else:
        saving = f"{100 * savings['saving']:.1f} ± {100 * savings['uncertainty']:.1f} % of stock's energy"
        if not savings["is_useful"]:
            saving += f"; useful after some {savings['useful_after_h']:.1f} h"
    table = Table.grid(padding=(0, 2))
    for name, value in {
        "instance": row["name"],
        "state": _state(row),
        "measured": f"{savings['controlled_h']:.2f} h and {savings['generation_tokens']:.0f} tokens under "
        f"control; {savings['stock_h']:.2f} h at stock in {savings['window_count']} windows",
        "energy": f"{_text(savings['joules_per_token'], '{:.3f} J/token')}"
        f"{_text(savings['stock_joules_per_token'], '; stock would use {:.3f}')}",
        "saved": saving,
        "in time": f"{_text(savings['attainment_ttft'], 'TTFT {:.2%}')}, "
        f"{_text(savings['attainment_itl'], 'ITL {:.2%}')}; objectives {row['ttft']}, {row['itl']}",
    }.items():
        table.add_row(name, printable(value).strip(", "))
    return table


def _text(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)
