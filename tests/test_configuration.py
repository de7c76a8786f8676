"""Settings: precedence of sources, and errors."""

from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from perseus import configuration
from perseus.configuration import ConfigurationError


class Oven(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="OVEN_", extra="forbid")

    heat_w: float = Field(default=100.0, gt=0)
    label: str = "plain"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "oven.toml"
    path.write_text('heat_w = 200.0\nlabel = "file"\n')
    return path


def test_flag_wins_over_environment_over_file_over_default(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert configuration.load(Oven, None, {}) == Oven(heat_w=100.0, label="plain")
    assert configuration.load(Oven, toml, {}).heat_w == 200.0
    monkeypatch.setenv("OVEN_HEAT_W", "300")
    assert configuration.load(Oven, toml, {"label": None}).heat_w == 300.0
    settings = configuration.load(Oven, toml, {"heat_w": 400.0})
    assert (settings.heat_w, settings.label) == (400.0, "file")
    assert type(settings) is Oven


def test_mistake_names_its_flag() -> None:
    with pytest.raises(ConfigurationError, match=r"--heat-w: Input should be greater than 0, found -1"):
        configuration.load(Oven, None, {"heat_w": -1})


def test_mistake_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVEN_HEAT_W", "hot")
    with pytest.raises(ConfigurationError, match=r"OVEN_HEAT_W: Input should be a valid number.*'hot'"):
        configuration.load(Oven, None, {})


def test_mistake_names_its_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "oven.toml"
    path.write_text("heat_w = -5\nsmell = 1\n")
    with pytest.raises(ConfigurationError) as caught:
        configuration.load(Oven, path, {})
    assert f"{path}: heat_w: Input should be greater than 0, found -5" in str(caught.value)
    assert f"{path}: smell: unknown setting" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [("heat_w = ", "expected TOML"), ("heat_w: 3", "expected TOML"), (None, "can't be read: No such file")],
)
def test_broken_and_missing_files_are_named(tmp_path: Path, text: str | None, mistake: str) -> None:
    path = tmp_path / "oven.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"oven\.toml: {mistake}"):
        configuration.load(Oven, path, {})
