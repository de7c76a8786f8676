"""The display of the inference demo: live on a terminal, line by line elsewhere."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from perseus.demo.screen import Screen, steps_table
from perseus.demo.serving_scenario import CONTROLLED, ENGINES, ITL, STEPS, TTFT, ServingOutcome

_DESCRIPTIONS = dict(
    zip(
        STEPS,
        (
            "the controller goes down clock by clock, as far as the objectives allow",
            "more requests at once: clocks rise",
            "and fall again",
        ),
        strict=True,
    )
)
WORDS = {
    "TTFT": f"time to first token of a request; its objective here is {TTFT}",
    "ITL": f"inter-token latency, from a token to the next; its objective here is {ITL}",
    "stock": "an engine whose GPU keeps its own clocks",
}
"""The words that the demo's lines use."""


class ServingLiveDisplay(Screen):
    """Shows steps and both engines; a context manager."""

    def __init__(self, console: Console) -> None:
        source = "measured by the engines' clients and by energy counters"
        super().__init__(console, "Perseus demo: inference", _DESCRIPTIONS, source)

    def refresh(self, outcome: ServingOutcome) -> None:
        """Show the latest second."""
        if self.is_live:
            done = dict.fromkeys(STEPS[: STEPS.index(self.step)], "")
            self.show(Group(steps_table(STEPS, _DESCRIPTIONS, self.step, done), _engines(outcome)))
        elif outcome.samples[-1].time_s % 5 == 0:
            latest = outcome.samples[-1]
            clock, power = latest.clocks_mhz[CONTROLLED], latest.powers_w
            self.print_line(
                f"{latest.time_s:3.0f} s: {latest.requests_per_s:.0f} requests/s, {clock} MHz, "
                + ", ".join(f"{each} {power[each]:.0f} W" for each in ENGINES)
            )


def _engines(outcome: ServingOutcome) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("engine", "clock", "power", "tokens/s", "J/token", "TTFT p99", "ITL p95"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    latest, figures = outcome.samples[-1], outcome.figures()
    for engine in ENGINES:
        table.add_row(
            engine,
            f"{latest.clocks_mhz[engine]} MHz",
            f"{latest.powers_w[engine]:.0f} W",
            f"{latest.tokens[engine]}",
            f"{figures[engine]['joules_per_token']:.2f}",
            _ms(figures[engine]["ttft_p99_s"]),
            _ms(figures[engine]["itl_p95_s"]),
        )
    return Group(Text(f"\n  {latest.requests_per_s:.0f} requests/s to each", style="dim"), table)


def serving_table(outcome: ServingOutcome) -> Table:
    """Return the closing table."""
    table = Table(title=f"Measured by clients and energy counters; TTFT {TTFT}, ITL {ITL}")
    table.add_column("phase", no_wrap=True)
    for column in ("requests", "clocks, MHz", "J/token: stock", "Perseus", "less", "TTFT p99", "ITL p95"):
        table.add_column(column, justify="right")
    for step in (*STEPS, None):
        figures = outcome.figures(step)
        stock, own = (figures[each] for each in ENGINES)
        lowest, highest = own["clocks_mhz"]
        table.add_row(
            step or "all",
            str(own["requests"]),
            f"{lowest} to {highest}",
            f"{stock['joules_per_token']:.2f}",
            f"{own['joules_per_token']:.2f}",
            f"{100 * outcome.less(step):.1f} %",
            f"{_ms(own['ttft_p99_s'])} ({_ms(stock['ttft_p99_s'])})",
            f"{_ms(own['itl_p95_s'])} ({_ms(stock['itl_p95_s'])})",
            end_section=step == STEPS[-1],
        )
    table.caption = "TTFT and ITL: under Perseus, and at stock in brackets"
    return table


def _ms(value_s: float | None) -> str:
    return "" if value_s is None else f"{1000 * value_s:.0f} ms"
