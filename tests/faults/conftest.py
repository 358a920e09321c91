"""The child of the sweeps, one for each process of pytest."""

import sys

import pytest

from tests.faults.sweep import Child, tracing_refused


@pytest.fixture(scope="session")
def child():
    if reason := tracing_refused():
        pytest.skip(f"system calls cannot be made to fail here: {reason}")
    child = Child()
    yield child
    child.close()


@pytest.fixture
def tell(capsys):
    """Prints a line that is seen also when all is well, and through xdist."""

    def tell(line):
        with capsys.disabled():
            print(f"\n{line}", file=sys.stderr)

    return tell
