"""Stores: the tables of keys and texts in which a framework's processes met; any of them can read and write there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as TorchsStore


class Store(Protocol):
    """Texts by key, the same for all processes."""

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        ...

    def add(self, key: str) -> int:
        """Count up, from 1, and return the number."""
        ...

    def get(self, key: str) -> str | None:
        """Return a text that nobody deletes meanwhile, None if there is none."""
        ...

    def delete(self, key: str) -> None:
        """Delete a text."""
        ...


@dataclass(frozen=True)
class TorchStore:
    """The store of torch's default process group."""

    store: TorchsStore
    """Torch's own."""

    @classmethod
    def current(cls) -> TorchStore:
        """Return it.

        Raises
        ------
        RuntimeError
            If the processes met elsewhere, as those of torch's MPI backend do.
        """
        # torch has no public way to it; tests/checks/test_exchange.py notices if it is kept elsewhere
        from torch.distributed.distributed_c10d import _get_default_store

        found = _get_default_store()
        if found is None:
            msg = (
                "torch's processes have no store through which they could be checked. Pass gather=, a function that is "
                "given a text and returns those of all processes, for instance one around all_gather_object."
            )
            raise RuntimeError(msg)
        return cls(found)

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        self.store.set(key, text)

    def add(self, key: str) -> int:
        """Count up, from 1, and return the number."""
        return int(self.store.add(key, 1))

    def get(self, key: str) -> str | None:
        """Return a text, None if there is none."""
        # what is no text is read as one that isn't what anybody says
        return self.store.get(key).decode(errors="replace") if self.store.check([key]) else None

    def delete(self, key: str) -> None:
        """Delete a text."""
        self.store.delete_key(key)


@dataclass(frozen=True)
class JaxStore:
    """The store of JAX's coordination service."""

    client: Any
    """This process's connection to the service; JAX has no type for it."""

    @classmethod
    def current(cls) -> JaxStore:
        """Return it."""
        # JAX has no public way to it; tests/processes/test_agreement.py notices if it is kept elsewhere
        from jax._src.distributed import global_state

        return cls(global_state.client)

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        self.client.key_value_set(key, text, allow_overwrite=True)

    def add(self, key: str) -> int:
        """Count up, from 1, and return the number."""
        return int(self.client.key_value_increment(key, 1))

    def get(self, key: str) -> str | None:
        """Return a text, None if there is none."""
        import jax

        try:
            return str(self.client.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def delete(self, key: str) -> None:
        """Delete a text."""
        self.client.key_value_delete(key)
