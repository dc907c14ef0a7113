"""Run mutmut, https://mutmut.readthedocs.io, with the bodies of properties among what it changes.

mutmut leaves decorated functions alone, since it can't know what a decorator does. What an epoch loses or repeats is in
properties here, and those of ``property`` and ``cached_property`` are known: the function that switches between mutants
gets the decorator, and the mutants go without.
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
    """Whether a node defines a property, under no other decorator."""
    if not isinstance(node, cst.FunctionDef) or len(node.decorators) != 1:
        return False
    decorator = node.decorators[0].decorator
    return isinstance(decorator, cst.Name) and decorator.value in PROPERTIES


def skips_other_decorators(visitor: file_mutation.MutationVisitor, node: cst.CSTNode) -> bool:
    """Whether mutmut leaves a node alone."""
    return not is_property(node) and skips(visitor, node)


def arranged_below_decorators(
    function: cst.FunctionDef, mutants: Iterable[file_mutation.Mutation], class_name: str | None
) -> tuple[Sequence[cst.CSTNode], Sequence[cst.CSTNode], Sequence[cst.CSTNode], Sequence[str]]:
    """Make a function and its mutants, of a property too."""
    if not is_property(function):
        return arranged(function, mutants, class_name)
    declared, (switch, *others), assigned, names = arranged(function.with_changes(decorators=[]), mutants, class_name)
    decorators = [*function.decorators, *switch.decorators]
    return declared, [switch.with_changes(decorators=decorators), *others], assigned, names


file_mutation.MutationVisitor._skip_node_and_children = skips_other_decorators
file_mutation.function_trampoline_arrangement = arranged_below_decorators

if __name__ == "__main__":
    cli()
