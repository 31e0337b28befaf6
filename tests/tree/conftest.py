"""Every behaviour test of the trees runs twice: on the native library and on its Python twin."""

import functools

import pytest

from tpverify import native


@pytest.fixture(scope="module", params=["native", "twin"])
def backend(request):
    """Which implementation the tree functions use during the test."""
    library = request.getfixturevalue("host_library") if request.param == "native" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "host", functools.partial(lambda found: found, library))
        yield request.param
