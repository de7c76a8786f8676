"""Waits of a sharded model, with a stand-in for torch's; tests/frameworks uses the real one."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.collective_waits import mark_waits, parameter_groups, refuse_unmarked_waits
from tests.agent.marks_stub import MarksStub
from tests.agent.marks_stub import attached as attached_to


class Group:
    """A group of parameters; as in torch, gathering is one of the steps before a forward."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def unshard(self) -> None:
        self.called.append("unshard")

    def pre_forward(self, value: str) -> str:
        self.unshard()
        return value

    def pre_backward(self) -> None:
        self.unshard()

    def post_backward(self) -> None:
        self.called.append("scatter")


def module(state: Any, *others: Any) -> Any:
    found = SimpleNamespace(_get_fsdp_state=lambda: state)
    found.modules = lambda: iter([found, SimpleNamespace(), *others])
    return found


GROUP, OTHER = Group(), Group()


def state(**places: Any) -> Any:
    return module(SimpleNamespace(**places))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(state(_fsdp_param_groups=[GROUP, OTHER]), [GROUP, OTHER], id="several groups"),
        pytest.param(state(_fsdp_param_group=GROUP), [GROUP], id="one group"),
        pytest.param(state(_fsdp_param_group=None), [], id="no parameters of its own"),
        pytest.param(
            module(SimpleNamespace(_fsdp_param_group=GROUP), state(_fsdp_param_group=GROUP)),
            [GROUP],
            id="sharded together",
        ),
        pytest.param(SimpleNamespace(modules=lambda: iter([SimpleNamespace()])), [], id="not sharded"),
    ],
)
def test_groups_are_found_in_every_version_s_place(model: Any, expected: list[Group]) -> None:
    assert list(parameter_groups(model)) == expected


@pytest.mark.parametrize(
    ("state", "lacking"),
    [(SimpleNamespace(), "_fsdp_param_group"), (SimpleNamespace(_fsdp_param_group=object()), "pre_forward")],
    ids=["no groups", "another group"],
)
def test_an_unknown_version_is_refused(state: Any, lacking: str) -> None:
    with pytest.raises(ValueError, match=f"found it without {lacking}"):
        list(parameter_groups(module(state)))


def sharded(*, over: int = 2, **sizes: int) -> Any:
    """A model as `fully_shard` leaves it on two ranks; `over`: over how many its parameter is distributed."""
    parameter = SimpleNamespace(device_mesh=SimpleNamespace(size=lambda: over))
    mesh = SimpleNamespace(mesh=SimpleNamespace(size=lambda: 2), **sizes)
    group = SimpleNamespace(mesh_info=mesh, fsdp_params=[SimpleNamespace(sharded_param=parameter)], **STEPS)
    model = state(_fsdp_param_groups=[group])
    model.parameters = lambda: [parameter]
    return model


def model_of(*modules: Any, **of_parameter: Any) -> Any:
    """A model of modules, with a parameter; `tests/frameworks` has those of torch."""
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(**of_parameter)])
    model.modules = lambda: iter([model, *modules])
    return model


def of(torch_module: str) -> Any:
    """A stage of the user's class, derived from one of torch's modules."""
    stage = type("Derived", (type("Base", (), {"__module__": torch_module}),), {})()
    stage.modules, stage.parameters = lambda: iter([stage]), list
    return stage


STEPS = dict.fromkeys(("unshard", "pre_forward", "pre_backward", "post_backward"))
MEGATRONS = type("Derived", (type("TorchFullyShardedDataParallel", (), {}),), {})
DDP = "torch.nn.parallel.distributed"


@pytest.mark.parametrize(
    ("model", "in_stage", "in_replica"),
    [
        (model_of(), "", ""),
        (sharded(shard_mesh_size=2), r"FSDP over 2 ranks .* within a stage", ""),
        (sharded(), "", ""),
        (model_of(sharded()), "replicas on 2 ranks .* of a part of a stage", ""),
        (sharded(over=4), "", "tensor or expert parallelism .* over 4 ranks"),
        (model_of(_st_info=object()), "", "tensor parallelism"),
        (of(DDP), "", ""),
        (model_of(of(DDP)), "DistributedDataParallel within a stage", ""),
        (model_of(of("torch.distributed._composable.replicate")), "replicate .* within a stage", ""),
        (model_of(SimpleNamespace(autotp_size=lambda: 2)), *["tensor parallelism .*, over 2 ranks"] * 2),
        (model_of(MEGATRONS()), *["Derived of"] * 2),
        (model_of(SimpleNamespace(zero_optimization_stage=lambda: 1)), "", ""),
        (model_of(SimpleNamespace(zero_optimization_stage=lambda: 2)), *["DeepSpeed's ZeRO stage 2"] * 2),
    ],
)
def test_waits_that_count_as_computing_are_refused(model: Any, in_stage: str, in_replica: str) -> None:
    for is_stage, found in ((True, in_stage), (False, in_replica)):
        if not found:
            refuse_unmarked_waits(model, "here", is_stage=is_stage)
            continue
        with pytest.raises(
            OSError, match=f"^here: expected .*, found {found}.*, where waiting counts as computing$"
        ):
            refuse_unmarked_waits(model, "here", is_stage=is_stage, refusal=OSError)


@pytest.fixture
def attached() -> Iterator[tuple[Attachment, MarksStub, Group]]:
    marks, group = MarksStub(), Group()
    attachment = attached_to(marks, 4)
    mark_waits(attachment, [group])
    yield attachment, marks, group
    attachment.detach()
    assert list(vars(group)) == ["called"], "left as it was"


def steps(group: Group) -> list[Callable[[], object]]:
    return [lambda: group.pre_forward("x"), group.pre_backward, group.post_backward, group.unshard]


def test_within_a_computation_each_is_one_wait_with_all_its_calls(
    attached: tuple[Attachment, MarksStub, Group],
) -> None:
    attachment, marks, group = attached
    attachment.begin_iteration()
    for step in range(4):
        attachment.begin(Kind.FORWARD, step)
        steps(group)[step]()
        attachment.end(Kind.FORWARD, step)
        wait = [("begin_wait",), ("end_wait",)]
        assert marks.calls[-4:] == [
            ("begin", Kind.FORWARD, step, 0),
            *wait,
            ("end", Kind.FORWARD, step, 0),
        ]
    assert group.called == ["unshard", "unshard", "scatter", "unshard"]
    assert group.pre_forward("x") == "x"


def test_outside_of_computations_nothing_is_marked(attached: tuple[Attachment, MarksStub, Group]) -> None:
    attachment, marks, group = attached
    for step in steps(group):
        step()
    attachment.begin_iteration()
    for step in steps(group):
        step()
    assert marks.calls == [("begin_iteration",)]
    attachment.begin(Kind.FORWARD, 0)
    attachment.end(Kind.FORWARD, 0)
    attachment.end_iteration()
    marks.calls.clear()
    group.unshard()
    assert marks.calls == []


@pytest.mark.parametrize("failing", ["begin_wait", "end_wait"])
def test_a_failure_of_ours_does_not_reach_the_training(
    attached: tuple[Attachment, MarksStub, Group], failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    attachment, marks, group = attached
    marks.failing = failing
    attachment.begin_iteration()
    attachment.begin(Kind.FORWARD, 0)
    assert group.pre_forward("x") == "x"
    assert "no longer marked" in caplog.text
    assert marks.calls[-1] == ("close",)
    group.unshard()
    attachment.end(Kind.FORWARD, 0)


def test_a_wait_that_raises_is_over(attached: tuple[Attachment, MarksStub, Group]) -> None:
    """Training may catch the exception, and continue computing."""
    attachment, marks, group = attached

    def broken() -> None:
        raise RuntimeError("a peer is gone")

    attachment.begin_iteration()
    attachment.begin(Kind.FORWARD, 0)
    with pytest.raises(RuntimeError, match="a peer is gone"):
        attachment.waiting(broken)()
    assert marks.calls[-2:] == [("begin_wait",), ("end_wait",)]
    group.unshard()
    assert marks.calls[-2:] == [("begin_wait",), ("end_wait",)]
    assert len(marks.calls) == 6, "the second wait is marked as well"
    attachment.end(Kind.FORWARD, 0)
