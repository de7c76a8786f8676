import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.claims.grants import ALL, Grant, MalformedGrantError, User, parse

ALICE = User(1004, "alice")
users = st.one_of(
    st.integers(0, 999_999).map(str),
    st.builds(
        "{}{}{}".format, st.sampled_from("az_"), st.text("az09._-", max_size=30), st.sampled_from(["", "$"])
    ),
)
gpus = st.one_of(
    st.integers(0, 9999).map(str),
    st.just(ALL),
    st.text("0123456789abcdef-", min_size=1, max_size=40).map("GPU-{}".format),
)
grants = st.lists(st.tuples(users, st.lists(gpus, min_size=1, max_size=5)), max_size=5)


@given(grants, st.sampled_from(["\n", "\r\n", "  # why\n", "\n\n# a comment: 1\n"]))
def test_written_grants_are_read_back(message: list[tuple[str, list[str]]], end: str) -> None:
    text = "".join(f"{user}:  {' '.join(names)} {end}" for user, names in message)
    assert parse(text) == tuple(Grant(user, frozenset(names)) for user, names in message)


@given(st.text())
def test_any_other_text_raises_one_error(text: str) -> None:
    try:
        found = parse(text)
    except MalformedGrantError as error:
        message = str(error)
    else:
        assert all(grant.user and grant.gpus for grant in found)
        return
    assert message.startswith("line ")
    assert message.isprintable()


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("alice 0 1", "line 1: expected USER: GPU …, found 'alice 0 1'"),
        ("# fine\nalice:", "line 2: expected a GPU's index or UUID, or all, found none"),
        ("alice: 0, 1", "line 1: expected a GPU's index or UUID, or all, found '0,'"),
        ("alice: ../etc", "found '../etc'"),
        ("alice: 12345678", "found '12345678'"),
        ("al ice: 0", "line 1: expected USER: GPU"),
        (": 0", "line 1: expected USER: GPU"),
        ("alice: GPU-\x1b[31m", r"found 'GPU-\\x1b\[31m'"),
        ("a: slurm-job=17", "line 1: expected a GPU's index or UUID, or all, found none"),
        ("a: 0 =17", "line 1: expected a label KEY=VALUE, found '=17'"),
        ("a: 0 Slurm=17", "line 1: expected a label KEY=VALUE, found 'Slurm=17'"),
        ("a: 0 job=\x1b", r"line 1: expected a label KEY=VALUE, found 'job=\\x1b'"),
        ("a: 0 " + " ".join(f"k{i}=v" for i in range(17)), "line 1: expected at most 16 labels, found 17"),
    ],
)
def test_a_mistake_is_named(text: str, mistake: str) -> None:
    with pytest.raises(MalformedGrantError, match=mistake):
        parse(text)


@pytest.mark.parametrize(
    ("line", "user", "is_theirs"),
    [
        ("alice: 0", ALICE, True),
        ("1004: 0", ALICE, True),
        ("bob: 0", ALICE, False),
        ("100: 0", ALICE, False),
        ("Alice: 0", ALICE, False),
        ("1004: 0", User(7, "1004"), False),
    ],
)
def test_the_user_of_a_grant(line: str, user: User, is_theirs: bool) -> None:
    (grant,) = parse(line)
    assert grant.is_for(user) is is_theirs


@pytest.mark.parametrize(
    ("line", "covers"),
    [
        ("a: 1", True),
        ("a: 01", True),
        ("a: GPU-b", True),
        ("a: all", True),
        ("a: 0", False),
        ("a: GPU-", False),
    ],
)
def test_which_gpus_a_grant_covers(line: str, covers: bool) -> None:
    (grant,) = parse(line)
    assert grant.covers("GPU-b", 1) is covers


def test_labels_may_be_mixed_with_gpus() -> None:
    (grant,) = parse("bob: 2 slurm-job=17 GPU-a slurm-account=physics.ml  # why")
    assert grant == Grant(
        "bob", frozenset({"2", "GPU-a"}), (("slurm-account", "physics.ml"), ("slurm-job", "17"))
    )
