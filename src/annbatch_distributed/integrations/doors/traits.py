"""A door to :mod:`annbatch_distributed.passes`, from when these names were found here."""

from annbatch_distributed.passes import chunk_size, n_draws, set_draws

__all__ = ["chunk_size", "n_draws", "set_draws"]
