"""Stores: tables of keys and texts in which a framework's processes met, with the methods of torch's stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as TorchStore

    from annbatch_distributed.ranks.membership import Framework

__all__ = ["JaxStore", "Store", "store_of"]

type Store = TorchStore | JaxStore


def store_of(framework: Framework) -> Store:
    """Return the store of a framework; a RuntimeError if its processes met elsewhere, as under torch's MPI backend."""
    # JAX has no public way to it, and torch not in all versions; the tests notice if it is kept elsewhere
    if framework == "jax":
        from jax._src.distributed import global_state

        return JaxStore(global_state.client)
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:
        raise RuntimeError(
            "torch's processes have no store through which they could be checked. Pass gather=, a function that is "
            "given a text and returns the texts of all processes, for instance one around all_gather_object."
        )
    return store


class JaxStore:
    """The table of JAX's coordination service."""

    def __init__(self, client: Any) -> None:  # noqa: ANN401 JAX has no type for a connection to the service
        self._client = client

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return it."""
        return int(self._client.key_value_increment(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether there are texts at all of some keys."""
        try:
            return all(self.get(key) for key in keys)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return False
            raise

    def get(self, key: str) -> bytes:
        """Return the text at a key, at which there is one."""
        return str(self._client.key_value_try_get(key)).encode()

    def compare_set(self, key: str, expected: str, text: str) -> None:
        """Write a text where there is none, which is what an empty text is expected for."""
        assert not expected
        try:
            self._client.key_value_set(key, text)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def delete_key(self, key: str) -> None:
        """Delete a text, if there is one."""
        self._client.key_value_delete(key)
