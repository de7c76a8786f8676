"""Settings for every test."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

# Assertions of modules that tests share tell what they found, as those of tests do.
pytest.register_assert_rewrite(*(f"tests.{each.stem}" for each in Path(__file__).parent.iterdir()))

pytest_plugins = ["pytester", "tests.leaks", "tests.ports", "tests.tiers"]

# Workers of pytest share the cores: BLAS threads would only wait for each other, which counts as CPU time.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

# A background job of a shell ignores Ctrl-C, and so would commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The number of examples per property depends on the run: few by default, more in `make test-all`, and many in
# a search (--hypothesis-profile=search). Their duration depends on the machine: no test fails for that.
for profile, max_examples in {"default": 20, "nightly": 100, "search": 2_000}.items():
    settings.register_profile(
        profile, max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("default")


# Without a configuration, rich renders tracebacks with all variables: seconds on the event loop.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Restore logging: a command inside a test sends logs to an output that is gone afterwards."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """Restore the interpreter's settings, which coordinator and agent tune; plots keep fonts open."""
    interval_s, threshold = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval_s)
    gc.set_threshold(*threshold)
    if "matplotlib.font_manager" in sys.modules:
        sys.modules["matplotlib.font_manager"]._get_font.cache_clear()
        sys.modules["matplotlib.mathtext"].MathTextParser._parse_cached.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _operator_token_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep tests' coordinators from writing tokens into the user's own folder."""
    path: Path = tmp_path_factory.mktemp("tokens") / "operator.token"
    os.environ["PERSEUS_COORDINATOR_OPERATOR_TOKEN_FILE"] = str(path)
