import pytest

from perseus.agent.probe.placement import NO_GPU, Placement, place_among_pipelines, place_in_mesh


def test_a_mesh_may_have_other_dimension_names() -> None:
    place = place_in_mesh(
        ("data", "stage", "expert"),
        (2, 2, 2),
        (1, 0, 1),
        NO_GPU,
        stage_dimension="stage",
        tensor_dimensions=["expert"],
    )
    assert place == Placement(1, 2, 0, 2, 1, 2)
    with pytest.raises(ValueError, match="device mesh: expected a dimension 'pp', found data, stage"):
        place_in_mesh(("data", "stage"), (2, 2), (1, 0), NO_GPU)


def test_without_a_mesh_every_group_is_a_pipeline() -> None:
    message = [(4, 6), (1, 3), (4, 6), (1, 3), (0, 2)]
    assert place_among_pipelines(3, message, "GPU-3") == Placement(1, 3, 1, 2, gpu_uuid="GPU-3")
    assert place_among_pipelines(4, message, NO_GPU) == Placement(2, 3, 0, 2)
    with pytest.raises(ValueError, match="pipelines: expected rank 9 in one of 3, found it in none"):
        place_among_pipelines(9, message, NO_GPU)


def test_a_place_outside_of_the_job_is_refused() -> None:
    with pytest.raises(ValueError, match="stage: expected 0 to 3, found 4"):
        Placement(pipeline=0, pipeline_count=1, stage=4, stage_count=4)
