"""What holds for every test."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester", "tests.leaks", "tests.ports", "tests.tiers"]

# Workers of pytest share the cores: threads of BLAS would only wait for each other, and that counts as work.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

# A run in the background of a shell ignores Ctrl-C, and so would commands that tests start and end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How many examples a property gets is the run's: few by default, more in `make test-all`, and many in a
# search (--hypothesis-profile=search). How long one takes is the machine's: no test fails for that.
for profile, max_examples in {"default": 20, "ci": 100, "search": 2_000}.items():
    settings.register_profile(
        profile, max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("default")


# Without a configuration, tracebacks are drawn by rich with all variables: seconds on the event loop.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that runs inside a test sends the logs to an output that is gone after it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """Coordinator and agent tune the interpreter, which is theirs alone in life; plots keep fonts open."""
    interval_s, threshold = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval_s)
    gc.set_threshold(*threshold)
    if "matplotlib.font_manager" in sys.modules:
        sys.modules["matplotlib.font_manager"]._get_font.cache_clear()
        sys.modules["matplotlib.mathtext"].MathTextParser._parse_cached.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _operator_token_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No coordinator of a test writes a token into the user's own folder."""
    path: Path = tmp_path_factory.mktemp("tokens") / "operator.token"
    os.environ["PERSEUS_COORDINATOR_OPERATOR_TOKEN_FILE"] = str(path)
