"""`perseus solve` and `perseus plan`: a frontier from a profile, a plan from a frontier. No service."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Group
from rich.table import Table

from perseus.cli.comparison import baselines
from perseus.cli.destination import Destination
from perseus.cli.executor import DaskInsecureOption, DaskOption, Executor, ProcessesOption
from perseus.cli.frontier_tables import (
    SAVED,
    frontier_promise,
    frontier_rows,
    frontier_table,
    plan_promise,
    plan_rows,
    plan_table,
    saved_percent,
)
from perseus.cli.graphs import node_rows, node_table, read_graph
from perseus.cli.progress import working
from perseus.cli.rebalancing import parse_layers, partitions_table, rows_with_partitions
from perseus.cli.rows import Format, FormatOption, show_rows
from perseus.cli.solve_many import expanded, solve_many
from perseus.cli.terminal import FAILURE, console, error_console, fail, warn
from perseus.regular_file import read_bounded
from perseus.schedule_name import ScheduleName

if TYPE_CHECKING:
    from perseus.solver import (
        Frontier,
        FrontierPoint,
        Measurement,
        Pipeline,
        Plan,
        ProfileKey,
        Rebalancing,
    )

# Counterparts of the coordinator's settings limit_solve_computations and request_limit_s.
_LIMIT_COMPUTATIONS = 8_192
_MAX_COMPUTATIONS = 65_536
_LIMIT_S = 120.0
_ALARM_S = 0.2

_COMPUTING_W = (5.0, 3000.0)
"""Wider than what any GPU draws that computes."""
_COMPUTATION_S = 10.0
"""Longer than any computation on one microbatch takes."""

LimitComputations = Annotated[
    int,
    typer.Option(min=1, max=_MAX_COMPUTATIONS, help="Refuse a problem with more computations."),
]
LimitS = Annotated[float, typer.Option(min=0.001, max=1e9, help="Time limit, seconds.")]


def solve(
    profile: Annotated[
        list[Path] | None,
        typer.Argument(
            help="CSV with the columns stage,instruction,frequency,time,energy "
            "(forward, backward, and those that the schedule adds: backward-input, backward-weight, "
            "recomputation; MHz, seconds, joules per GPU), chunk if stages have several, and "
            "time_se,energy_se if standard errors are known. All other columns are further settings, "
            "such as power_limit_w or kernel. Several files, or a pattern in quotes, are solved at once.",
            show_default=False,
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Microbatches per iteration.", show_default=False)
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            metavar="GRAPH.json",
            help="Instead of a profile: a graph of computations, its edges and profiles "
            "(perseus.v1.GraphProblem as JSON).",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        ScheduleName, typer.Option(help="Order of the computations.")
    ] = ScheduleName.ONE_FORWARD_ONE_BACKWARD,
    gpus_per_stage: Annotated[int, typer.Option(min=1, help="GPUs that share each stage.")] = 1,
    blocking_power_w: Annotated[
        str,
        typer.Option(
            metavar="POWER",
            help="Power of one GPU that waits for communication, watts; or by the clock that it holds "
            "meanwhile, the highest being stock: 705=69.5,1410=83.6.",
        ),
    ] = "0",
    confidence_percent: Annotated[
        float,
        typer.Option(
            min=50.0,
            max=99.999,
            help="Least probability that a plan keeps its iteration time, by the standard errors. No more "
            "than 99.98 is promised.",
        ),
    ] = 95.0,
    assume_error_percent: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=50.0,
            help="Standard error to assume of each time and energy of which the profile has none. Without "
            "any, plans have no margin and promise nothing.",
            show_default=False,
        ),
    ] = None,
    points: Annotated[int, typer.Option(min=3, max=10_000, help="Plans to compute on the frontier.")] = 100,
    hull_tolerance_percent: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=99.0,
            help="Solve large problems sooner: plan on curves that are lower by at most this share of each "
            "computation's energy. The lower bound is lower by at most that. By default 0 up to 4,096 "
            "computations, 0.2 beyond.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also show what one clock for all, one per stage, and EnvPipe's plan save in the same time.",
        ),
    ] = False,
    rebalance: Annotated[
        bool,
        typer.Option(
            "--rebalance",
            help="Also show what moving layers between stages would bring beside clocks. Needs --layers.",
        ),
    ] = False,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="Layers of each stage, as 7,8,8,7, or one number for all; of each chunk, in the model's "
            "order, if stages have several.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the frontier here, as JSON; of several profiles, a folder.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the frontier here; the suffix names the format, PNG if none.")
    ] = None,
    limit_computations: LimitComputations = _LIMIT_COMPUTATIONS,
    limit_s: LimitS = _LIMIT_S,
    processes: ProcessesOption = None,
    dask: DaskOption = None,
    dask_insecure: DaskInsecureOption = False,
    form: FormatOption = Format.TABLE,
) -> None:
    """Compute the iteration time-energy frontier of one pipeline from its profile, or of a graph."""
    with without_pyplot():
        from perseus import solver

    if rebalance != (layers is not None):
        fail("--rebalance: expected together with --layers")
    if bool(profile) == (graph is not None):
        fail(f"PROFILE: expected a profile or --graph, found {'both' if profile else 'none'}")
    if graph is not None:
        of_pipelines = {
            "--microbatches": microbatches is not None,
            "--schedule": schedule is not ScheduleName.ONE_FORWARD_ONE_BACKWARD,
            "--gpus-per-stage": gpus_per_stage != 1,
            "--blocking-power-w": blocking_power_w != "0",
            "--compare": compare,
            "--rebalance": rebalance,
            "--assume-error-percent": assume_error_percent is not None,
            "--dask": dask is not None,
            "--processes": processes is not None,
        }
        if flag := next((name for name, is_given in of_pipelines.items() if is_given), None):
            fail(f"{flag}: expected without --graph, whose file has the whole problem")
    elif microbatches is None:
        fail("--microbatches: expected the number of microbatches of an iteration, found none")
    waiting = _blocking_power_w(blocking_power_w)
    if confidence_percent / 100 > solver.MAX_CONFIDENCE:
        warn(
            f"--confidence-percent: a margin can be shown to suffice in {100 * solver.MAX_CONFIDENCE:.2f} of "
            f"100 cases at most, found {confidence_percent:g}: plans promise no more than that"
        )

    def read(path: Path) -> "Pipeline":
        measured = solver.read_profile_csv(path, gpus_per_stage)
        if assume_error_percent is not None:
            measured = _with_errors(measured, assume_error_percent / 100)
        profiles = solver.shrink_profiles(measured)
        stage_count = 1 + max(stage for stage, _, _ in profiles)
        _check_settings(path, profiles)
        assert microbatches is not None
        counts = stage_count, microbatches, 1 + max(chunk for _, chunk, _ in profiles)
        _check_size(solver.max_computations(schedule, *counts), points, limit_computations)
        waiting_w, by_clock_w = solver.blocking_of_stages(waiting, gpus_per_stage, stage_count)
        pipeline = solver.Pipeline(
            schedule=solver.named_schedule(schedule, *counts),
            profiles=profiles,
            blocking_power_w=waiting_w,
            blocking_powers_w=by_clock_w,
        )
        if found := wrong_unit(pipeline, gpus_per_stage, str(path), "--blocking-power-w"):
            warn(found)
        return pipeline

    options: dict[str, Any] = {
        "point_count": points,
        "hull_tolerance": None if hull_tolerance_percent is None else hull_tolerance_percent / 100,
        "confidence": confidence_percent / 100,
    }
    paths = expanded(profile or [])
    if len(paths) > 1 or dask is not None:
        alone = {"--compare": compare, "--rebalance": rebalance, "--plot": plot is not None}
        if flag := next((flag for flag, is_given in alone.items() if is_given), None):
            fail(f"{flag}: expected one profile, and no --dask")
        executor = Executor.of_flags(processes, dask, dask_insecure)
        try:
            solve_many(paths, read, options, output, executor, limit_s, form)
        except solver.SolverError as error:
            fail(str(error))
        return
    source = graph or paths[0]
    destination = _checked("--output", output, source)
    picture = _checked("--plot", plot, source)
    if picture is not None:
        check_picture(picture)
        if destination is not None:
            picture.check_other_than(destination)
    try:
        problem = None
        with working("Reading"):
            if graph is None:
                pipeline = read(source)
            else:
                problem = read_graph(graph, points, limit_computations)
                pipeline = problem.pipeline
        model = solver.layers_along_path(pipeline, parse_layers(layers)) if layers is not None else ()
        with _at_most(limit_s), working("Solving", is_measured=True) as report:
            frontier = solver.solve(pipeline, on_progress=report, **options)
            others = baselines(frontier.pipeline) if compare else {}
        with _at_most(limit_s), working("Rebalancing"):
            advice = solver.rebalance(frontier, model) if model else None
    except solver.SolverError as error:
        fail(f"{graph}: {error}" if graph else str(error))
    is_data = any(each.is_standard_output for each in (destination, picture) if each is not None)
    if not is_data:
        rows = frontier_rows(frontier, others)
        tables = [frontier_table(rows, problem is not None)]
        if advice is not None:
            from perseus.service.domain.messages import rebalancing_to_proto

            moving = rebalancing_to_proto(advice)
            tables.append(partitions_table(moving))
            rows = rows_with_partitions(rows, moving)
        show_rows(form, rows, list(rows[0]), lambda: Group(*tables))
    notes = console if form is Format.TABLE and not is_data else error_console
    if frontier.hull_tolerance:
        notes.print(
            f"Planned on curves that are lower by at most {100 * frontier.hull_tolerance:g} % of each "
            f"computation's energy (--hull-tolerance-percent): the bounds are lower by at most "
            f"{100 * frontier.bound_slack:.3f} % for it.",
            highlight=False,
        )
    elif frontier.bound_slack:
        notes.print(
            "Some measurements differ so little in time that the curve between them is too steep to plan on: "
            f"the bounds are lower by at most {100 * frontier.bound_slack:.2g} % for it.",
            highlight=False,
        )
    if settings := _settings_found(pipeline.profiles):
        notes.print(settings, highlight=False)
    if frontier.margin is not None or notes is console:  # rows and files for scripts say it themselves
        notes.print(frontier_promise(frontier, pipeline, is_graph=problem is not None), highlight=False)
    if destination is not None:
        from perseus.cli.frontier_file import frontier_text

        with working("Writing"):
            _write(destination, frontier_text(frontier, problem))
    if picture is not None:
        with working("Drawing"):
            _draw(picture, frontier, others, advice)


def plan(
    frontier_file: Annotated[
        Path,
        typer.Argument(
            metavar="FRONTIER.json", help="A frontier written by `perseus solve`.", show_default=False
        ),
    ],
    iteration_time: Annotated[
        float | None, typer.Option(help="Longest iteration time of the plan, seconds.", show_default=False)
    ] = None,
    no_slowdown: Annotated[
        bool, typer.Option("--no-slowdown", help="The plan may not be slower than with the highest clocks.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    limit_computations: LimitComputations = _LIMIT_COMPUTATIONS,
    limit_s: LimitS = _LIMIT_S,
    form: FormatOption = Format.TABLE,
) -> None:
    """Make the plan of least energy that meets an iteration time, or that is not slower than stock."""
    from google.protobuf import json_format

    with without_pyplot():
        from perseus import solver
        from perseus.cli.frontier_file import plan_text, problem_from_text
        from perseus.service.domain import errors
        from perseus.service.domain.errors import cut

    if (iteration_time is None) != no_slowdown:
        fail("expected one of --iteration-time and --no-slowdown")
    destination = _checked("--output", output, frontier_file)
    try:
        with working("Reading"):
            text = read_bounded(frontier_file).decode("utf-8-sig")
            problem, point_count, confidence = problem_from_text(text, limit_computations)
        graph = problem if isinstance(problem, solver.ComputationGraph) else None
        pipeline = problem.pipeline if isinstance(problem, solver.ComputationGraph) else problem
        # As `solve` did: a plan for one time alone would be a little dearer than its row there.
        with _at_most(limit_s), working("Planning", is_measured=True) as report:
            frontier = solver.solve(pipeline, point_count=point_count, on_progress=report)
            made = _plan_of(
                frontier, frontier.baseline.iteration_time_s if iteration_time is None else iteration_time
            )
    except OSError as error:
        fail(f"{frontier_file}: can't be read: {error.strerror}")
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        fail(f"{frontier_file}: expected a frontier as JSON, found: {cut(error)}")
    except solver.DeadlineError as error:
        fail(f"--iteration-time: {error}")
    except (solver.SolverError, errors.ServiceError) as error:
        fail(f"{frontier_file}: {error}")
    if destination is None or not destination.is_standard_output:
        rows = plan_rows(made, confidence) if graph is None else node_rows(graph, frontier, made)
        saving_percent = saved_percent(frontier.baseline, made)
        promise = plan_promise(confidence)

        def table() -> Table:
            if graph is not None:
                return node_table(made, saving_percent, rows, SAVED)
            return plan_table(made, saving_percent, rows, f"{SAVED}\n{promise}")

        show_rows(form, rows, list(rows[0]), table)
        if graph is not None and form is Format.TABLE:
            error_console.print(promise, highlight=False)
    if destination is not None:
        _write(destination, plan_text(made, graph, confidence=confidence))


def _blocking_power_w(text: str) -> float | dict[int, float]:
    """Return the power of a waiting GPU, at any clock or by clock."""
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        if "=" not in text:
            found: float | dict[int, float] = _watts_of(text)
        else:
            found = {int(clock_mhz): _watts_of(power_w) for clock_mhz, _, power_w in pairs}
            if len(found) < len(pairs):
                raise ValueError
    except ValueError:
        expected = "watts, or watts by clock as 705=69.5,1410=83.6, each clock once"
        raise typer.BadParameter(
            f"expected {expected}, found {text!r}", param_hint="--blocking-power-w"
        ) from None
    return found


def _watts_of(text: str) -> float:
    power_w = float(text)
    if not power_w >= 0:
        raise ValueError
    return power_w


def wrong_unit(pipeline: "Pipeline", gpus_per_stage: int, profile: str, blocking_power: str) -> str:
    """Return a line on a figure that can't be, as in another unit; nothing if there is none.

    `profile`, `blocking_power`: the places to name.
    """
    figures = [
        (f"stage {stage} {kind.value} at {m.clock_mhz} MHz", m)
        for (stage, _, kind), measured in pipeline.profiles.items()
        for m in measured
    ]
    draws_w = [(m.energy_j / m.time_s / gpus_per_stage, where) for where, m in figures]
    least_w, most_w = _COMPUTING_W
    for power_w, where in (min(draws_w), max(draws_w)):
        if not least_w <= power_w <= most_w:
            return (
                f"{profile}: {where}: expected energy / time to be {least_w:g} to {_watts(most_w)} a GPU, "
                f"found {_watts(power_w)}: are times in seconds, energies in joules per GPU?"
            )
    waiting_w, (computing_w, _) = max(pipeline.stock_blocking_power_w) / gpus_per_stage, max(draws_w)
    if waiting_w > computing_w:
        return (
            f"{blocking_power}: expected a waiting GPU to draw at most what a computing one does, "
            f"{_watts(computing_w)}, found {_watts(waiting_w)}: is it in watts per GPU?"
        )
    longest_s, where = max((m.time_s, where) for where, m in figures)
    if longest_s > _COMPUTATION_S:
        return (
            f"{profile}: {where}: expected a time of at most {_COMPUTATION_S:g} s, found {longest_s:,.6g} s: "
            "are times in seconds?"
        )
    return ""


def _watts(power_w: float) -> str:
    return f"{power_w:,.0f} W" if power_w >= _COMPUTING_W[0] else f"{power_w:.3g} W"


@contextmanager
def without_pyplot() -> Iterator[None]:
    """Import igraph without pyplot, which it loads for drawings that are not needed here.

    Loading it takes as long as solving a small problem. Our own pictures import matplotlib when drawn.
    """
    if "matplotlib" in sys.modules:
        yield
        return
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["matplotlib"]


def _checked(flag: str, path: Path | None, read: Path) -> Destination | None:
    if path is None:
        return None
    destination = Destination(flag, path)
    destination.check(read)
    return destination


def check_picture(picture: Destination) -> None:
    """Exit unless the picture's suffix is that of an image format."""
    from perseus.pictures import image_format

    try:
        image_format(picture.path)
    except ValueError as error:
        fail(f"{picture.flag}: {error}")


def _check_size(computation_count: int, point_count: int, maximum: int) -> None:
    from perseus.service.api.translate_problems import MAX_SOLVED_CHOICE_COUNT

    if computation_count > maximum:
        fail(
            f"--microbatches: expected at most {maximum} computations (--limit-computations), "
            f"found {computation_count}"
        )
    max_points = MAX_SOLVED_CHOICE_COUNT // computation_count
    if point_count > max_points:
        expected = f"at most {max_points} for {computation_count} computations"
        fail(f"--points: expected {expected}, found {point_count}")


def _check_settings(profile: Path, profiles: "Mapping[ProfileKey, Sequence[Measurement]]") -> None:
    """Exit if a computation has more settings than a frontier's file may hold."""
    from perseus.service.domain.bounds import MAX_CLOCK_COUNT

    for (stage, _, kind), measured in profiles.items():
        if len(measured) > MAX_CLOCK_COUNT:
            fail(
                f"{profile}: expected at most {MAX_CLOCK_COUNT} rows of one computation, "
                f"found {len(measured)} of stage {stage} {kind.value}"
            )


def _settings_found(profiles: "Mapping[ProfileKey, Sequence[Measurement]]") -> str:
    """Describe the parts of the profile's settings; return nothing if they are only clocks."""
    from perseus.solver import MeasuredSetting

    first = next(iter(profiles.values()))[0]
    if not isinstance(first, MeasuredSetting):
        return ""
    *others, last = (name for name, _ in first.further)
    names = f"{', '.join(['frequency', *others])} and {last}"
    fewest, largest = (pick(map(len, profiles.values())) for pick in (min, max))
    counts = largest if fewest == largest else f"{fewest} to {largest}"
    return f"Settings are of {names}, {counts} a computation."


class _TooLongError(Exception):
    """The time limit has passed."""


@contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """Exit once the block takes longer, by a signal: igraph checks for signals as Python does."""

    def end(*_: object) -> NoReturn:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, end)
    # Repeatedly: an exception that a handler raises during garbage collection is lost.
    signal.setitimer(signal.ITIMER_REAL, limit_s, _ALARM_S)
    try:
        yield
    except _TooLongError:
        fail(f"expected to finish within {limit_s:g} s (--limit-s), found more to do", FAILURE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _with_errors(
    profiles: "Mapping[ProfileKey, tuple[Measurement, ...]]", share: float
) -> "dict[ProfileKey, tuple[Measurement, ...]]":
    """Return the profiles with this standard error, as a share, of each figure that has none."""
    return {
        key: tuple(
            replace(
                m,
                time_se_s=m.time_se_s or share * m.time_s,
                energy_se_j=m.energy_se_j or share * m.energy_j,
            )
            for m in some
        )
        for key, some in profiles.items()
    }


def _plan_of(frontier: "Frontier", time_s: float) -> "Plan":
    """Return the plan for that time; that of a point if the time is a point's."""
    if any(time_s in (point.deadline_s, point.iteration_time_s) for point in frontier.points):
        return frontier.plan_within(time_s)
    return frontier.plan(time_s)


def _write(destination: Destination, text: str) -> None:
    destination.write(lambda stream: stream.write(text.encode()))


def _draw(
    destination: Destination,
    frontier: "Frontier",
    others: "Mapping[str, tuple[Plan, ...]]",
    advice: "Rebalancing | None",
) -> None:
    from perseus import pictures

    drawn: dict[str, Sequence[Plan | FrontierPoint]] = {**others}
    after = None if advice is None else advice.steps[-1] if advice.steps else advice.other
    if after is not None:
        drawn[f"layers {','.join(map(str, after.layers))}"] = after.frontier.points

    picture = pictures.FrontierPicture(
        iteration_time_s=[point.iteration_time_s for point in frontier.points],
        energy_j=[point.energy_j for point in frontier.points],
        bound_energy_j=[point.bound_energy_j for point in frontier.points],
        t_star_index=frontier.t_star_index,
        baseline_time_s=frontier.baseline.iteration_time_s,
        baseline_energy_j=frontier.baseline.energy_j,
        blocking_power_w=frontier.baseline.blocking_power_w,
        others={
            name: [(plan.iteration_time_s, plan.energy_j) for plan in plans]
            for name, plans in drawn.items()
            if plans
        },
    )
    image = pictures.draw_frontier(picture, pictures.image_format(destination.path))
    destination.write(lambda stream: stream.write(image))
