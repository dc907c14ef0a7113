"""Problems: the error for files and arguments that can't be collected."""

from __future__ import annotations


class Problems(ValueError):
    """Error with a message for each problem, in ``args``.

    Messages of :func:`.collect` name its arguments. Messages of the command name its options.
    """

    def __str__(self) -> str:
        return "\n".join(self.args)
