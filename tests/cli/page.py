"""The page about the command line, and the keys of what commands print as JSON."""

from __future__ import annotations

from tests.processes.launch import ROOT

PAGE = (ROOT / "docs" / "command-line.md").read_text()


def not_named(content: object) -> set[str]:
    """Which keys the page doesn't name."""
    return {key for key in keys_in(content) if f"`{key}`" not in PAGE}


def keys_in(content: object) -> set[str]:
    """Which keys there are, at any depth."""
    if isinstance(content, dict):
        return set(content).union(*map(keys_in, content.values()))
    return set().union(*map(keys_in, content)) if isinstance(content, list) else set()
