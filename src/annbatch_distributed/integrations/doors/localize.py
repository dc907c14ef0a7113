"""A door to :mod:`annbatch_distributed.passes`, from when these names were found here."""

from annbatch_distributed.passes import localize

__all__ = ["localize"]
