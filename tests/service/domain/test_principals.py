"""Grants, and tokens that are valid, wrong, expired or revoked."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import (
    InvalidFieldError,
    JobOutOfScopeError,
    TokenExpiredError,
    TokenRevokedError,
    TokenUnknownError,
)
from perseus.service.domain.principals import (
    MAX_PATTERN_COUNT,
    Grant,
    Scope,
    Token,
    TokenRegistry,
    check_token_name,
    digest_of,
)

TOKEN = Token("ci", digest_of("perseus_secret"), Grant(Scope.AGENT, ("llama-*", "opt-?", "GPT*")), 100.0)


@pytest.mark.parametrize(
    ("job_id", "is_covered"),
    [
        ("llama-70b", True),
        ("llama-", True),
        ("opt-1", True),
        ("GPT3", True),
        ("gpt3", False),
        ("opt-10", False),
        ("llama", False),
        ("", False),
    ],
)
def test_an_agent_speaks_for_the_jobs_of_its_patterns(job_id: str, is_covered: bool) -> None:
    assert TOKEN.grant.covers(job_id) is is_covered
    if not is_covered:
        with pytest.raises(JobOutOfScopeError, match="token ci may not speak for job"):
            TOKEN.principal.check_job(job_id)


@pytest.mark.parametrize("scope", Scope)
def test_only_an_operator_speaks_for_all_jobs_without_patterns(scope: Scope) -> None:
    assert Grant(scope).covers("job") is (scope is Scope.OPERATOR)


@given(st.text())
def test_a_text_is_a_grant_or_is_refused(text: str) -> None:
    try:
        grant = Grant.parse(text)
    except InvalidFieldError:
        return
    assert grant.check() is grant


@pytest.mark.parametrize(
    ("text", "grant"),
    [
        ("operator", Grant(Scope.OPERATOR)),
        ("reader", Grant(Scope.READER)),
        ("grid", Grant(Scope.GRID)),
        ("agent:a-*,b", Grant(Scope.AGENT, ("a-*", "b"))),
        ("agent:a-*,b@node-1,gpu*", Grant(Scope.AGENT, ("a-*", "b"), ("node-1", "gpu*"))),
    ],
)
def test_grants_are_parsed_as_in_the_configuration(text: str, grant: Grant) -> None:
    assert Grant.parse(text) == grant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "agent",
        "agent:",
        "agent:a b",
        "reader:a",
        "reader:@a",
        "operator:*",
        "root",
        "agent:[a]",
        "agent:a@b c",
    ],
)
def test_an_invalid_grant_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError):
        Grant.parse(text)


def test_an_agent_has_no_more_patterns_than_allowed() -> None:
    Grant(Scope.AGENT, ("a",) * MAX_PATTERN_COUNT).check()
    with pytest.raises(InvalidFieldError, match="job_patterns: expected at most 64"):
        Grant(Scope.AGENT, ("a",) * (MAX_PATTERN_COUNT + 1)).check()


def test_a_token_is_found_only_by_its_secret() -> None:
    registry = TokenRegistry([TOKEN])
    assert registry.find("perseus_secret", 100.0) is TOKEN
    for wrong in ("perseus_secre", "perseus_secret ", "", TOKEN.digest, TOKEN.name, "\ud800"):
        with pytest.raises(TokenUnknownError):
            registry.find(wrong, 100.0)


def test_a_token_ends_when_it_expires_or_is_revoked() -> None:
    registry = TokenRegistry([replace(TOKEN, expire_time_s=200.0)])
    assert registry.find("perseus_secret", 199.9).name == "ci"
    with pytest.raises(TokenExpiredError, match="'ci' has expired"):
        registry.find("perseus_secret", 200.0)
    registry.put(replace(TOKEN, revoke_time_s=150.0))
    with pytest.raises(TokenRevokedError, match="'ci' is revoked"):
        registry.find("perseus_secret", 150.0)


def test_a_replaced_token_is_unknown() -> None:
    registry = TokenRegistry([TOKEN])
    registry.put(replace(TOKEN, digest=digest_of("perseus_other")))
    assert registry.find("perseus_other", 100.0).name == "ci"
    with pytest.raises(TokenUnknownError):
        registry.find("perseus_secret", 100.0)
    assert [token.name for token in registry.tokens] == ["ci"]


@pytest.mark.parametrize("name", ["", "-a", "A", "a" * 64, "a b", "a\n"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError):
        check_token_name(name)
