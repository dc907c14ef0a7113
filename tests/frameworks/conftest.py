"""The collection is that of the other tests with real processes."""

from tests.processes.conftest import collection

__all__ = ["collection"]
