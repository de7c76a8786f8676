"""The names that benchmarks and studies build on."""

import perseus.solver
from perseus.solver import study


def test_public_names() -> None:
    assert sorted(study.__all__) == [
        "EmulatedComputation",
        "EmulatedIteration",
        "EmulatedPipeline",
        "FittedTimes",
        "MeasuredIteration",
        "Replicas",
        "Transfers",
        "emulate",
        "emulated_iteration_time_s",
        "envpipe",
        "fit_times",
        "with_fitted_times",
        "with_occupying_transfers",
        "zeus_global",
        "zeus_per_stage",
    ]
    assert all(hasattr(study, name) for name in study.__all__)
    assert not set(study.__all__) & set(perseus.solver.__all__), "a name has one home"
