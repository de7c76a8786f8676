"""Trades only ever help and keep the deadline, and what is undone is as it was."""

from hypothesis import given, settings
from hypothesis import strategies as st

from perseus.solver import Pipeline
from perseus.solver.assignment import Assignment, Choice, Neighbourhood
from perseus.solver.columns import Columns
from perseus.solver.graph import build_event_graph
from perseus.solver.rounding import Roundings
from perseus.solver.sweep import sweep_frontier
from perseus.solver.trades import Trades
from tests.solver.pipelines import pipelines


@given(
    pipeline=pipelines(), share=st.floats(0, 1), changes=st.lists(st.tuples(st.integers(0), st.integers(0)))
)
@settings(max_examples=40)
def test_an_assignment_keeps_its_slack_and_can_be_undone(
    pipeline: Pipeline, share: float, changes: list[tuple[int, int]]
) -> None:
    graph = build_event_graph(pipeline)
    neighbourhood = Neighbourhood(graph)
    count = len(graph.computations)
    deadline_ps = sum(max(times_ps) for times_ps in neighbourhood.times_ps)
    assignment = Assignment(neighbourhood, [0] * count, round(share * deadline_ps))
    before = list(assignment.choice), [assignment.slack_ps(i) for i in range(count)]
    mark = assignment.mark()
    for i, option in changes:
        assignment.choose(i % count, option % len(neighbourhood.times_ps[i % count]))
    fresh = Assignment(neighbourhood, assignment.choice, round(share * deadline_ps))
    assert [assignment.slack_ps(i) for i in range(count)] == [fresh.slack_ps(i) for i in range(count)]
    assignment.undo_to(mark)
    assert (assignment.choice, [assignment.slack_ps(i) for i in range(count)]) == before


@given(pipeline=pipelines(), share=st.floats(0, 1))
@settings(max_examples=40)
def test_trades_save_energy_in_time_until_none_is_left(pipeline: Pipeline, share: float) -> None:
    graph = build_event_graph(pipeline)
    sweep = sweep_frontier(graph)
    deadline_ps = sweep.t_min_ps + int(share * (sweep.t_slow_ps - sweep.t_min_ps))
    columns = Columns(graph)
    roundings = Roundings(graph, columns)
    rounded = columns.to_choices(roundings.round(*roundings.of(sweep.event_times_at(deadline_ps))))
    trades = Trades(graph)

    def effective_j(choice: Choice) -> float:
        return float(columns.effective_energies_j(columns.to_columns([choice]))[0])

    for choice in rounded.tolist():
        traded = trades.improve(choice, deadline_ps)
        assert effective_j(traded) <= effective_j(choice) + 1e-9 * abs(effective_j(choice))
        checked = Assignment(Neighbourhood(graph), traded, deadline_ps)
        assert all(checked.slack_ps(i) >= 0 for i in range(len(traded)))
        assert trades.improve(traded, deadline_ps) == traded
