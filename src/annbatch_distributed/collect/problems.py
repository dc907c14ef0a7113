"""Problems: the error for files and arguments that can't be collected."""

from __future__ import annotations

import re


class Problems(ValueError):
    """Error with a message for each problem, in ``args``.

    Messages of :func:`.collect` name its arguments. Messages of the command name its options.
    """

    def __str__(self) -> str:
        return "\n".join(self.args)


def in_arguments(text: str) -> str:
    """Return a text with arguments of Python in place of options.

    >>> in_arguments("--group-by kind: no such column. Pass --make-unique")
    'group_by kind: no such column. Pass make_unique'
    """
    return re.sub(r"(?<![\w-])--([a-z][a-z-]+)", lambda match: match[1].replace("-", "_"), text)
