"""The plan of repeated launches in the frameworks' tests."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.frameworks.restart_plan import LAYERS, MAX_RANKS, launches

seeds = st.integers(0, 2**32)


@given(seeds)
def test_every_launch_spreads_all_layers_over_existing_ranks(seed: int) -> None:
    for launch in launches(30, seed):
        layout = launch.layout
        assert sum(layout.layers) == LAYERS
        assert min(layout.layers) >= 1
        assert layout.pipeline_count * layout.stage_count <= MAX_RANKS
        assert layout.microbatch_count >= layout.stage_count


@given(seeds)
def test_a_launch_differs_from_the_previous_one_unless_nothing_changed(seed: int) -> None:
    every = list(launches(30, seed))
    for before, after in pairwise(every):
        assert (before.layout == after.layout) == (after.change == "nothing")
    assert every == list(launches(30, seed)), "the same for everybody"


def test_the_short_sequence_has_kills_and_changes_and_the_long_one_every_kind() -> None:
    """The seeds of the two tests."""
    short, long = list(launches(4, seed=4)), list(launches(30, seed=30))
    assert sum(each.is_killed for each in short) >= 2
    assert {each.change for each in short} >= {"stages", "split"}
    assert {each.change for each in long} == {"nothing", "microbatches", "split", "stages", "replicas"}
    ends = {(each.is_killed, each.short_iterations is None) for each in long}
    assert ends == {(False, False), (False, True), (True, False), (True, True)}
