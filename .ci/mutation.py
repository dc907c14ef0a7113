"""Run mutmut, https://mutmut.readthedocs.io, and also change the bodies of properties.

mutmut skips decorated functions, because it doesn't know their decorators. Here, properties compute the dropped and
repeated rows of an epoch, and the decorators ``property`` and ``cached_property`` are known: the function that switches
between mutants gets the decorator, and the mutants don't.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst
from mutmut.__main__ import cli
from mutmut.mutation import file_mutation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROPERTIES = {"property", "cached_property"}

skips = file_mutation.MutationVisitor._skip_node_and_children
arranged = file_mutation.function_trampoline_arrangement


def is_property(node: cst.CSTNode) -> bool:
    """Return True if a node defines a property without other decorators."""
    if not isinstance(node, cst.FunctionDef) or len(node.decorators) != 1:
        return False
    decorator = node.decorators[0].decorator
    return isinstance(decorator, cst.Name) and decorator.value in PROPERTIES


def skips_other_decorators(visitor: file_mutation.MutationVisitor, node: cst.CSTNode) -> bool:
    """Return True if mutmut must not change a node."""
    return not is_property(node) and skips(visitor, node)


def arranged_below_decorators(
    function: cst.FunctionDef, mutants: Iterable[file_mutation.Mutation], class_name: str | None
) -> tuple[Sequence[cst.CSTNode], Sequence[cst.CSTNode], Sequence[cst.CSTNode], Sequence[str]]:
    """Return the mutants of a function or a property."""
    if not is_property(function):
        return arranged(function, mutants, class_name)
    declared, (switch, *others), assigned, names = arranged(function.with_changes(decorators=[]), mutants, class_name)
    decorators = [*function.decorators, *switch.decorators]
    return declared, [switch.with_changes(decorators=decorators), *others], assigned, names


file_mutation.MutationVisitor._skip_node_and_children = skips_other_decorators
file_mutation.function_trampoline_arrangement = arranged_below_decorators

if __name__ == "__main__":
    cli()
