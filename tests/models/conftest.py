"""Published checkpoints for the tests of families, layouts and damage."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(family)` -> the published checkpoint with its torch models, built once a file."""
    import published

    root, built = tmp_path_factory.mktemp("published"), {}

    def get(family):
        if family not in built:
            built[family] = published.build(family, root / family)
        return built[family]

    return get
