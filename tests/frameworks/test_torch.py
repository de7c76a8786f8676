"""`torch.distributed.pipelining`, really training on CPUs under a real coordinator and real agents."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus import solver
from perseus.agent.link.computation import Kind
from perseus.v1 import job_pb2
from tests.frameworks.cases import (
    MICROBATCHES,
    STEADY_MICROBATCHES,
    UNEVEN,
    WATCHED,
    Case,
    check_case,
    check_identities,
    check_losses,
    check_plan,
    identities,
    keep,
    start,
)
from tests.frameworks.real_run import STEP_TIMEOUT_S, Figures, RealRun, is_no_slower, real_run
from tests.frameworks.versions import NEWEST_TORCH, skip_unless_there

pytestmark = pytest.mark.slow("trains for real, with the framework")

ONE_CHUNK = Case("torch_trainer", "1F1B", UNEVEN, 1, 0.04, 0.08, microbatch_count=STEADY_MICROBATCHES)
# Two stages wait for each other at every step. The light one is light enough to keep some slack under any
# plan; otherwise the times of messages on a CPU, which predictions exclude, would add up.
HALF_LIGHT = (0.6, 1.0)
INTERLEAVED = Case("torch_trainer", "Interleaved1F1B", HALF_LIGHT, 2, 0.045, 0.09)
V_SHAPED = Case("torch_trainer", "ZBVZeroBubble", HALF_LIGHT, 2, 0.045, 0.09)
DUAL_PIPE_V = Case("torch_trainer", "DualPipeV", HALF_LIGHT, 2, 0.03, 0.06)
TENSOR_PARALLEL = Case("torch_trainer", "1F1B", HALF_LIGHT, 1, 0.05, 0.1, pipeline_count=2, tensor_count=2)
REPLICATED = Case("torch_trainer", "1F1B", HALF_LIGHT, 1, 0.06, 0.12, pipeline_count=2)
DATA_PARALLEL = Case("replica_trainer", "ddp", (1.0,), 1, 0.04, 0.1, pipeline_count=4)
# FSDP2 waits between parts: three of each forward, four or five of each backward take these times. All ranks
# synchronise after each part, and then compute a little: so each has its own core, and parts are few.
FULLY_SHARDED = Case("replica_trainer", "fsdp2", (1.0,), 1, 0.08, 0.16, pipeline_count=2, microbatch_count=1)
SHORT = [
    replace(DATA_PARALLEL, forward_s=0.005, backward_s=0.01, pipeline_count=2),
    replace(FULLY_SHARDED, forward_s=0.005, backward_s=0.01),
]
HYBRID_SHARDED = Case("replica_trainer", "hsdp", (1.0,), 1, 0.05, 0.1, pipeline_count=4, microbatch_count=1)
WITH_CHILDREN = Case("replica_trainer", "ddp-children", (1.0,), 1, 0.03, 0.06, pipeline_count=2)
STRAGGLER, SLOWDOWN = 1, 1.3
BUDGET_PERCENT = 20


@pytest.mark.timeout(600)
async def test_1f1b(tmp_path: Path) -> None:
    async with real_run(ONE_CHUNK.workload, tmp_path / "logs", start(ONE_CHUNK, tmp_path)) as run:
        await run.until_planned()
        plan = await check_plan(run)
        await check_identities(run, identities(solver.one_forward_one_backward(4, STEADY_MICROBATCHES)))
    check_losses(ONE_CHUNK, tmp_path)
    keep(ONE_CHUNK, "torch-1f1b", 10, "torch, 1F1B", run.stock, plan)


@pytest.mark.timeout(600)
async def test_interleaved_1f1b(tmp_path: Path) -> None:
    async with real_run(INTERLEAVED.workload, tmp_path / "logs", start(INTERLEAVED, tmp_path)) as run:
        await run.until_planned()
        plan = await check_plan(run)
        expected = solver.interleaved_one_forward_one_backward(2, MICROBATCHES, 2)
        await check_identities(run, identities(expected))
    check_losses(INTERLEAVED, tmp_path)
    keep(INTERLEAVED, "torch-interleaved", 11, "torch, interleaved 1F1B", run.stock, plan)


@pytest.mark.timeout(600)
async def test_zbv(tmp_path: Path) -> None:
    async with real_run(V_SHAPED.workload, tmp_path / "logs", start(V_SHAPED, tmp_path)) as run:
        await run.until_planned()
        plan = await check_plan(run)
        assert run.paths() == [[(0, 0), (1, 0), (1, 1), (0, 1)]]
        for stage, order in enumerate(run.registered()):
            split = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
            whole = {Kind.FORWARD, Kind.BACKWARD}
            assert sorted(order) == sorted(
                (int(kind), microbatch, chunk)
                for microbatch in range(MICROBATCHES)
                for chunk in range(2)
                for kind in (whole if (stage, chunk) == (0, 0) else split)
            )
        await check_identities(run, run.registered())
    check_losses(V_SHAPED, tmp_path)
    keep(V_SHAPED, "torch-zbv", 12, "torch, ZBV", run.stock, plan)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "name", "position", "title"),
    [
        (DUAL_PIPE_V, "torch-dual-pipe-v", 12, "torch, DualPipeV"),
        (TENSOR_PARALLEL, "torch-tensor", 14, "torch, 1F1B, data and tensor parallel"),
    ],
    ids=["DualPipeV", "tensor parallel"],
)
async def test_a_plan_is_reached(case: Case, name: str, position: int, title: str, tmp_path: Path) -> None:
    await check_case(case, name, position, title, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "position", "title"),
    [
        (WITH_CHILDREN, 17, "torch, DistributedDataParallel, loaders spawned, forked children killed"),
        (HYBRID_SHARDED, 19, "torch, HSDP (fully_shard over 2 × 2)"),
    ],
    ids=["children", "HSDP"],
)
async def test_replicas_keep_a_slowdown_budget(case: Case, position: int, title: str, tmp_path: Path) -> None:
    within = f"{title}, a budget of {BUDGET_PERCENT} %"
    await check_case(
        case, f"torch-{case.schedule}", position, within, tmp_path, budget_percent=BUDGET_PERCENT
    )


@pytest.mark.timeout(600)
async def test_a_straggling_replica_is_detected_and_answered(tmp_path: Path) -> None:
    async with real_run(REPLICATED.workload, tmp_path / "logs", start(REPLICATED, tmp_path)) as run:
        await run.until_planned()
        plan = await check_plan(run)
        await check_identities(run, identities(solver.one_forward_one_backward(2, MICROBATCHES)))

        answer = await answer_to_straggler(run, plan)
        assert run.observer.job is not None
        assert answer.after_iterations <= 6
        assert answer.planned_s > 1.15 * run.observer.job.t_min_s, (
            "the other replica takes the time that there is"
        )
        assert answer.answered.time_s <= 1.02 * SLOWDOWN * plan.time_s
    check_losses(REPLICATED, tmp_path)
    keep(REPLICATED, "torch-replicas", 13, "torch, 1F1B, 2 replicas", run.stock, plan)
    answer.keep(REPLICATED, "torch-replicas-straggler", 14, "the same, a replica slowed by 30 %")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "position", "title"),
    [
        (DATA_PARALLEL, 15, "torch, DistributedDataParallel"),
        (FULLY_SHARDED, 18, "torch, FSDP2 (fully_shard)"),
    ],
    ids=["DistributedDataParallel", "fully_shard"],
)
async def test_replicas_without_pipelines_keep_a_slowdown_budget_and_answer_a_straggler(
    case: Case, position: int, title: str, tmp_path: Path
) -> None:
    """The fast replicas' wait for a slow one is not part of their computations."""
    async with real_run(case.workload, tmp_path / "logs", start(case, tmp_path)) as run:
        await run.until_planned()
        order = [(int(kind), microbatch, 0) for microbatch in range(case.microbatch_count) for kind in (1, 2)]
        assert run.registered() == [order]
        plan = await run.plan_beside_stock(WATCHED)
        assert run.stock is not None

        await run.set_policy(job_pb2.OperatingPolicy(max_slowdown_percent=BUDGET_PERCENT))
        budgeted = await run.watch(WATCHED)
        assert is_no_slower(budgeted, plan, 1.02 * (1 + BUDGET_PERCENT / 100))
        assert budgeted.energy_j < 0.97 * plan.energy_j

        await run.set_policy(job_pb2.OperatingPolicy(no_slowdown=job_pb2.NoSlowdown()))
        answer = await answer_to_straggler(run, plan)
        assert is_no_slower(answer.answered, answer.unanswered)
        assert answer.answered.energy_j < 0.97 * answer.unanswered.energy_j
    check_losses(case, tmp_path)
    name, slowed = f"torch-{case.schedule}", f"the same, a replica slowed by {100 * (SLOWDOWN - 1):.0f} %"
    within = f"{title}, a budget of {BUDGET_PERCENT} %"
    keep(case, f"{name}-budget", position, within, run.stock, budgeted, budget_percent=BUDGET_PERCENT)
    answer.keep(case, f"{name}-straggler", position + 1, slowed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.schedule)
async def test_computations_much_shorter_than_the_counters_windows_are_planned(
    case: Case, tmp_path: Path
) -> None:
    """5 and 10 ms, between updates of a counter every 100 ms, with an evaluation after every iteration."""
    async with real_run(case.workload, tmp_path / "logs", start(case, tmp_path)) as run:
        await run.until_planned()
        frontier = await run.frontier()
        assert frontier.points[-1].energy_j < 0.9 * frontier.baseline.energy_j
    check_losses(case, tmp_path)


@dataclass(frozen=True, slots=True)
class Answer:
    """The cost of a slow replica with and without slowing the others to match it."""

    after_iterations: int
    planned_s: float
    """Iteration time under the others' answering plans."""
    unanswered: Figures
    answered: Figures

    def keep(self, case: Case, name: str, position: int, title: str) -> None:
        """Write the result, compared with the same straggler without an answer."""
        plural = "" if self.after_iterations == 1 else "s"
        note = f"answered after {self.after_iterations} iteration{plural}"
        keep(case, name, position, title, self.unanswered, self.answered, base="unanswered", note=note)


async def answer_to_straggler(run: RealRun, plan: Figures) -> Answer:
    """Slow a replica down, wait for detection and answer, and then withdraw the answer.

    There are too few iterations between the slowdown and its answer for a comparison. An operator's report,
    which overrides detection, gives as many iterations without an answer as with one.
    """
    observer = run.observer
    run.cluster.degrade(STRAGGLER, SLOWDOWN)
    first = observer.next_whole_iteration
    await observer.until(
        "the straggler detected, and its answer in force",
        lambda: (
            observer.stragglers == {STRAGGLER}
            and observer.is_in_force()
            and observer.in_force_since() > first
        ),
        STEP_TIMEOUT_S,
    )
    after_iterations = observer.in_force_since() - first
    answered = await run.watch(WATCHED)
    assert run.observer.job is not None
    planned_s = run.observer.job.planned_iteration_time_s[0]
    await run.report_no_straggler(STRAGGLER)
    unanswered = await run.watch(WATCHED)
    print(
        f"\n{run.workload.job_id}, straggler: iteration {plan.time_s:.4f} s → {unanswered.time_s:.4f} s, "
        f"answered after {after_iterations} iterations: {answered.time_s:.4f} s; "
        f"energy {unanswered.energy_j:.1f} J → {answered.energy_j:.1f} J"
    )
    return Answer(after_iterations, planned_s, unanswered, answered)


@pytest.mark.parametrize("folders", [[], [NEWEST_TORCH]])
def test_every_schedule_registers_its_executed_order_and_detaches_cleanly(
    folders: list[str], tmp_path: Path
) -> None:
    """Run all of torch's schedules without agents: the solver takes the orders, and marks follow them."""
    skip_unless_there(*folders)
    case = Case("torch_orders", "all", (1.0, 1.0), 1, 0.0, 0.0, beside=folders)
    done = subprocess.run(
        [sys.executable, *case.command(case.alone(tmp_path / "run", 0))],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the framework's table has" not in done.stderr
    ranks = [json.loads((tmp_path / "run" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert set(ranks[0]) == {
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    }  # fmt: skip
    for name in ranks[0]:
        registration = ranks[0][name]["registration"]
        schedule = solver.Schedule(
            tuple(
                tuple(
                    solver.Computation(stage, solver.Kind[Kind(kind).name], microbatch, chunk)
                    for kind, microbatch, chunk in order
                )
                for stage, order in enumerate(registration["orders"])
            ),
            tuple(tuple((stage, chunk) for stage, chunk in path) for path in registration["paths"]),
        )
        kinds = {computation.kind for computation in schedule.computations}
        is_split = name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        assert (solver.Kind.BACKWARD_WEIGHT in kinds) == is_split, name
        for stage, rank in enumerate(ranks):
            assert rank[name]["iterations"] == 3 * [registration["orders"][stage]], f"{name}, rank {stage}"
            alone, attached = rank[name]["losses"]
            assert attached == alone, name
        assert any(rank[name]["losses"][0][0] for rank in ranks)
        assert {count for counts in registration["stage_layers"] for count in counts} == {1}, name
        works = registration["stage_work"]
        assert all(re.fullmatch(r"\d+ parameters, [0-9a-f]{32}", work) for work in works), works
        assert len({*works}) == 2, "one has the embedding, the other one the head"
    one_chunk = {tuple(ranks[0][name]["registration"]["stage_work"]) for name in ("GPipe", "1F1B")}
    assert len(one_chunk) == 1, "the same work in whatever order"
