"""Problems: the error for files and arguments that can't be collected."""

from __future__ import annotations


class Problems(ValueError):
    """Error with a message for each problem, in ``args``.

    Messages name an argument by its option of the command ``collect``, such as ``--layer``.
    """

    def __str__(self) -> str:
        return "\n".join(self.args)
