"""Attach to Megatron-Core with one line, once its parallel state is initialised.

    from perseus.agent.megatron import attach

    with attach(config, job_id="gpt"):
        run_forward_backward = get_forward_backward_func()
        for _ in range(iterations):
            run_forward_backward(...)
            ...

Megatron-LM has its own training loop, `megatron.training`, which creates its configuration itself. There the
line goes into the script that calls `pretrain`, anywhere before that call:

    from perseus.agent.megatron import wrap_training

    wrap_training(job_id="gpt")

There are two seams.

`schedules`, the default, replaces functions of `megatron.core.pipeline_parallel.schedules`, which the
schedules look up there at every call: `forward_step` and `backward_step` are the computations, and the three
`forward_backward_…` functions the iterations. The arguments of `forward_step` give its microbatch and its
virtual stage, which is the chunk. A backward has no number; it belongs to the forward whose output it
receives.

`timers` patches nothing in Megatron: Megatron starts and stops `config.timers` around iterations and
computations. Existing timers keep working. This seam is for custom schedules that keep these timers, with one
chunk per stage, as it can only count computations, and for code that does not set `config.timers`.
Megatron-LM does (`train` and `evaluate` set it), so with `megatron.training` this seam is refused.

Forward-only iterations are not marked.
"""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment, never_raises, stands_aside, weak_reference
from perseus.agent.probe.client import Probe
from perseus.agent.probe.collective_waits import refuse_unmarked_waits
from perseus.agent.probe.exchange import StoreExchange
from perseus.agent.probe.framework import Argument, check_attributes, find_argument
from perseus.agent.probe.job_spec import check_job
from perseus.agent.probe.marks import Connect, UnmarkableError
from perseus.agent.probe.placement import Placement, gpu_uuid
from perseus.agent.probe.stage_work import StageWork, stage_work, while_alive
from perseus.agent.probe.tested_versions import note_versions
from perseus.agent.probe.torch_marks import connect_marks
from perseus.agent.probe.unmarked_steps import watch_steps

if TYPE_CHECKING:
    import torch

# Megatron-LM's own loop, if present.
_LOOP = "megatron.training.training"
# These don't run computations by forward_step and backward_step, or vary them.
_UNSUPPORTED = ("overlap_moe_expert_parallel_comm", "hybrid_context_parallel")
# Over so many ranks, which count as replicas, each layer's weights are gathered before it runs.
_GATHERED = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
_ITERATIONS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
# Fields of a configuration on which a stage's computation times depend besides its parameters; and its size,
# as there is no model at hand where timers are the seam.
_OF_WORK = (
    "num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_moe_experts",
    "moe_router_topk",
    "pipeline_dtype",
    "fp8",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)
_OF_MICROBATCHES = ("seq_length", "micro_batch_size")
_OF_PARALLEL_STATE = (
    "model_parallel_is_initialized",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
)

_UNMARKED = (
    "no forward-backward function of Megatron-Core runs for training: call get_forward_backward_func() after "
    "attach"
)


@never_raises
def attach(
    config: Any,
    *,
    job_id: str,
    seam: Literal["schedules", "timers"] = "schedules",
    connect: Connect = Probe.connect,
    max_slowdown_percent: float = 0.0,
) -> Attachment:
    """Attach this rank to the agent of its node. Called by all ranks of the job, before training.

    `config`: the model's `ModelParallelConfig`. `max_slowdown_percent`: how much slower than stock plans may
    be. `connect` replaces `Probe.connect` in tests and demonstrations.

    A rank attaches once: another call for the same job, such as by Megatron-LM once for each virtual
    stage, returns the existing attachment.

    Raises ValueError if the parallel state is not initialised, for a configuration that marks can't follow,
    for an unknown version of Megatron-Core, and for a job or seam other than the attached one. Without an
    agent the hook logs one line, and training continues as before.
    """
    import torch
    from megatron.core import __version__, parallel_state
    from megatron.core.pipeline_parallel import schedules

    note_versions("megatron", str(__version__), str(torch.__version__))
    if (there := OfThisProcess.attachment(job_id, seam)) is not None:
        return there
    check_attributes(parallel_state, "megatron.core.parallel_state", *_OF_PARALLEL_STATE)
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError("Megatron-Core: expected its parallel state to be initialised, found it is not")
    for name in _UNSUPPORTED:
        if getattr(config, name, False):
            raise ValueError(f"config: {name}: expected False, as marks can't follow it, found True")
    has_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    if seam == "timers" and _LOOP in sys.modules:
        raise ValueError(
            "seam: expected 'schedules', as Megatron-LM's own loop sets config.timers, found 'timers'"
        )
    if seam == "timers" and has_chunks:
        raise ValueError("seam: expected 'schedules', as there are virtual stages, found 'timers'")
    marked_schedules = None
    if seam == "schedules":
        virtual_stage = parallel_state.get_virtual_pipeline_model_parallel_rank
        marked_schedules = MarkedSchedules(schedules, virtual_stage)
    else:
        check_attributes(config, "config", "timers")
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    placement = _placement(parallel_state, device)
    refuse_shared_weights(config, placement)
    attachment = Attachment(
        placement,
        connect_marks(connect, job_id, placement, device),
        StoreExchange(placement.pipeline, placement.tensor),
        work=while_alive(lambda config: work_of(config, marked_schedules), config),
        max_slowdown_percent=max_slowdown_percent,
    )

    def put_marks() -> None:
        if marked_schedules is not None:
            marked_schedules.mark(attachment)
        else:
            timers = MarkedTimers(attachment, config.timers, torch.is_grad_enabled)
            attachment.replace(config, "timers", timers)
        watch_steps(attachment, lambda: _UNMARKED)

    OfThisProcess.keep(attachment, job_id, seam)
    return attachment.put_marks(put_marks)


def wrap_training(
    *, job_id: str, connect: Connect = Probe.connect, max_slowdown_percent: float = 0.0
) -> None:
    """Make Megatron-LM's own loop attach when it trains, and detach when it ends; arguments as above.

    All ranks call this before `pretrain`; once is enough. If the loop exits by itself (an exit interval, a
    signal), the job stays unfinished. Raises ValueError for invalid arguments, and for a Megatron-LM without
    `megatron.training.training.train`, or whose `train` takes no `config`. A training that can't be attached
    is logged, and continues as before.
    """
    check_job(job_id, max_slowdown_percent)
    training = importlib.import_module(_LOOP)
    check_attributes(training, _LOOP, "train")
    wrap_train(
        training,
        lambda config: attach(
            config, job_id=job_id, connect=connect, max_slowdown_percent=max_slowdown_percent
        ),
    )


def wrap_train(training: Any, attach_config: Callable[[Any], Attachment]) -> None:
    """Make the function `train` of a module attach. ValueError if it takes no `config`."""
    train, attach_config = training.train, stands_aside(attach_config)
    config_of = find_argument(train, "config", f"{_LOOP}: train")

    @wraps(train)
    def attached_train(*args: Any, **kwargs: Any) -> Any:
        with attach_config(config_of(args, kwargs)):
            return train(*args, **kwargs)

    training.train = attached_train


class OfThisProcess:
    """The process's attachment, until it detaches: a process is one rank."""

    _latest: ClassVar[tuple[Attachment, str, str] | None] = None

    @classmethod
    def attachment(cls, job_id: str, seam: str) -> Attachment | None:
        """Return the existing attachment, if any; ValueError if it is of another job or seam."""
        if cls._latest is None:
            return None
        attachment, *known = cls._latest
        if known != [job_id, seam]:
            raise ValueError(
                f"attach: expected job {known[0]!r} and seam {known[1]!r}, which this process has attached, "
                f"found {job_id!r} and {seam!r}; detach first"
            )
        return attachment

    @classmethod
    def keep(cls, attachment: Attachment, job_id: str, seam: str) -> None:
        """Remember an attachment until it is detached."""
        cls._latest = attachment, job_id, seam

        def forget() -> None:
            cls._latest = None

        attachment.when_detached(forget)


def _placement(parallel_state: Any, device: "torch.device") -> Placement:
    tensor_count = parallel_state.get_tensor_model_parallel_world_size()
    return Placement(
        pipeline=parallel_state.get_data_parallel_rank(),
        pipeline_count=parallel_state.get_data_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stage_count=parallel_state.get_pipeline_model_parallel_world_size(),
        tensor=parallel_state.get_context_parallel_rank() * tensor_count
        + parallel_state.get_tensor_model_parallel_rank(),
        tensor_count=parallel_state.get_context_parallel_world_size() * tensor_count,
        gpu_uuid=gpu_uuid(device),
    )


def refuse_shared_weights(config: Any, placement: Placement) -> None:
    """Raise ValueError if replicas share weights: then they wait for each other within computations.

    Megatron-Core spreads experts over one replica's ranks first.
    """
    for name in _GATHERED:
        if (ranks := getattr(config, name, None) or 1) > 1:
            raise ValueError(
                f"config: {name}: expected 1, found {ranks} ranks that gather their weights for every "
                "computation, where waiting counts as computing"
            )
    experts = getattr(config, "expert_model_parallel_size", 1)
    count = experts * (getattr(config, "expert_tensor_parallel_size", None) or 1)
    if count > placement.tensor_count:
        raise ValueError(
            f"config: expert_model_parallel_size: expected experts on the {placement.tensor_count} tensor- "
            f"and context-parallel ranks, found them on {count}, where waiting counts as computing"
        )


def work_of(config: Any, schedules: "MarkedSchedules | None") -> StageWork:
    """Return the work of this rank's stage (`probe.stage_work`), as observed in an iteration's calls."""
    import torch
    from megatron.core import __version__

    has_one_length = not getattr(config, "variable_seq_lengths", False)
    return stage_work(
        schedules.models if schedules is not None else [],
        torch=str(torch.__version__),
        megatron=str(__version__),
        config={name: str(getattr(config, name, None)) for name in _OF_WORK},
        microbatch=schedules.microbatch if schedules is not None and has_one_length else {},
    )


class MarkedSchedules:
    """Marks around the functions of `megatron.core.pipeline_parallel.schedules`, in any known version.

    `virtual_stage` returns the executing virtual stage, for versions without that argument of `forward_step`
    (0.12).

    Attributes:
        microbatch: the microbatch size according to the latest training call.
    """

    def __init__(self, schedules: Any, virtual_stage: Callable[[], int | None]) -> None:
        """Find the functions and their parameters; ValueError if one is missing."""
        where = "megatron.core.pipeline_parallel.schedules"
        check_attributes(schedules, where, "forward_step", "backward_step", *_ITERATIONS)
        self._schedules = schedules
        self._forward_step = schedules.forward_step
        self._backward_step = schedules.backward_step
        self._microbatch_of = find_argument(
            self._forward_step, "current_microbatch", f"{where}: forward_step"
        )
        self._model_of: Argument = lambda _args, _kwargs: None
        if "model" in inspect.signature(self._forward_step).parameters:
            self._model_of = find_argument(self._forward_step, "model", f"{where}: forward_step")
        self._input_of: Argument = lambda _args, _kwargs: None
        if "input_tensor" in inspect.signature(self._forward_step).parameters:
            self._input_of = find_argument(self._forward_step, "input_tensor", f"{where}: forward_step")
        self._output_of = find_argument(self._backward_step, "output_tensor", f"{where}: backward_step")
        self._chunk_of: Argument = lambda _args, _kwargs: virtual_stage()
        if "vp_stage" in inspect.signature(self._forward_step).parameters:
            self._chunk_of = find_argument(self._forward_step, "vp_stage", f"{where}: forward_step")
        # The microbatch and chunk of each forward whose backward is to come, by the id of its output, which
        # Megatron keeps until then.
        self._awaited: dict[int, tuple[int, int]] = {}
        # The module of each chunk, which lives no longer than without this.
        self._models: dict[int, Callable[[], Any]] = {}
        self.microbatch: dict[str, int] = {}
        self._is_training = False
        # Whether the current forward has received another stage's output.
        self._has_input = False

    @property
    def models(self) -> list[Any]:
        """The modules of the chunks that have computed so far."""
        found = [self._models[chunk]() for chunk in sorted(self._models)]
        return [model for model in found if model is not None]

    def mark(self, attachment: Attachment) -> None:
        """Replace the functions until the attachment is detached."""
        for name in _ITERATIONS:
            run = getattr(self._schedules, name)
            attachment.replace(self._schedules, name, self._marked_iteration(attachment, run))
        forward_step = attachment.marked(
            self._forward_step, partial(self._forward, attachment), partial(self._note_forward, attachment)
        )
        attachment.replace(self._schedules, "forward_step", forward_step)
        backward_step = attachment.marked(self._backward_step, self._backward)
        attachment.replace(self._schedules, "backward_step", backward_step)

    def _marked_iteration(self, attachment: Attachment, run: Callable[..., Any]) -> Callable[..., Any]:
        is_forward_only = None
        if "forward_only" in inspect.signature(run).parameters:
            is_forward_only = find_argument(run, "forward_only", run.__name__)

        def is_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return is_forward_only is None or not is_forward_only(args, kwargs)

        @wraps(run)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._is_training = bool(attachment.ask(is_training, args, kwargs))
            try:
                if not self._is_training:
                    return run(*args, **kwargs)
                self._awaited.clear()
                self.microbatch = {name: kwargs[name] for name in _OF_MICROBATCHES if name in kwargs}
                attachment.begin_iteration()
                result = run(*args, **kwargs)
                attachment.end_iteration()
                return result
            finally:
                self._is_training = False

        return marked

    def _forward(
        self, attachment: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Kind, int, int] | None:
        if not self._is_training:
            return None
        chunk = self._chunk_of(args, kwargs) or 0
        model = self._model_of(args, kwargs)
        is_new, self._models[chunk] = chunk not in self._models, weak_reference(model)
        if model is not None and is_new:  # `attach` has no model
            refuse_unmarked_waits(model, f"chunk {chunk}", is_stage=True, refusal=UnmarkableError)
        value = self._input_of(args, kwargs)
        received = value[0] if isinstance(value, list) and value else value
        self._has_input = received is not None
        if self._has_input:
            attachment.count_work(lambda: received)
        return Kind.FORWARD, self._microbatch_of(args, kwargs), chunk

    def _note_forward(self, attachment: Attachment, forward: tuple[Kind, int, int], result: Any) -> None:
        """Note a forward's output; its size is the work on the first stage, elsewhere the input's is."""
        _, microbatch, chunk = forward
        self._awaited[id(result[0])] = microbatch, chunk
        if not self._has_input:
            attachment.count_work(lambda: result[0])

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, int, int] | None:
        forward = self._awaited.pop(id(self._output_of(args, kwargs)), None)
        return None if forward is None else (Kind.BACKWARD, *forward)


class MarkedTimers:
    """Replaces `config.timers`: marks, and passes all calls on to the previous timers.

    `is_training` returns whether the iteration that begins will have backwards.
    """

    def __init__(
        self, attachment: Attachment, timers: Callable[..., Any] | None, is_training: Callable[[], bool]
    ) -> None:
        self._attachment = attachment
        self._timers = timers
        self._is_training = is_training
        # Computations of each kind in the iteration so far; those of a kind come in order.
        self._counts = {Kind.FORWARD: 0, Kind.BACKWARD: 0}
        self._marks: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "forward-backward": (self._begin_iteration, self._end_iteration),
            "forward-compute": (partial(self._begin, Kind.FORWARD), partial(self._end, Kind.FORWARD)),
            "backward-compute": (partial(self._begin, Kind.BACKWARD), partial(self._end, Kind.BACKWARD)),
        }

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the timer of a name, as Megatron requests it."""
        timer = self._timers(name, *args, **kwargs) if self._timers is not None else _NO_TIMER
        return _MarkedTimer(timer, *self._marks[name]) if name in self._marks else timer

    def __getattr__(self, name: str) -> Any:
        """Pass other attributes on to the previous timers."""
        return getattr(self._timers, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the previous timers: training with a copied configuration is not marked."""
        return copy.deepcopy(self._timers, memo)

    def _begin_iteration(self) -> None:
        self._counts.update(dict.fromkeys(self._counts, 0))
        if self._attachment.ask(self._is_training):
            self._attachment.begin_iteration()

    def _end_iteration(self) -> None:
        if self._counts[Kind.BACKWARD]:
            self._attachment.end_iteration()

    def _begin(self, kind: Kind) -> None:
        self._attachment.begin(kind, self._counts[kind])

    def _end(self, kind: Kind) -> None:
        self._attachment.end(kind, self._counts[kind])
        self._counts[kind] += 1


class _MarkedTimer:
    """A timer whose start and stop mark as well."""

    def __init__(self, timer: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._timer = timer
        self._begin = begin
        self._end = end

    def start(self, *args: Any, **kwargs: Any) -> Any:
        result = self._timer.start(*args, **kwargs)
        self._begin()
        return result

    def stop(self, *args: Any, **kwargs: Any) -> Any:
        self._end()
        return self._timer.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


class _NoTimer:
    """A timer that does nothing, if there were no timers before."""

    def start(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing."""

    def stop(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing."""


_NO_TIMER = _NoTimer()
