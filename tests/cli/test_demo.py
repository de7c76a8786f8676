"""`perseus demo` with input with which it can't begin."""

from pathlib import Path

from typer.testing import CliRunner

from perseus.cli.main import app


def test_a_script_that_does_not_attach_is_bad_input(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('training')\n")
    output = tmp_path / "out"
    result = CliRunner().invoke(app, ["demo", "--script", str(script), "--output", str(output)])
    assert result.exit_code == 2
    assert f"{script}: expected `from … import attach`" in result.output
    assert not any(output.iterdir())
