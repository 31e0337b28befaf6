"""What tests of this folder share."""

from collections.abc import Iterator

import pytest

from tpverify.runtime import cluster


@pytest.fixture(scope="session")
def one_ray() -> Iterator[None]:
    """That every group of the folder joins, also after faults."""
    with cluster.session():
        yield
