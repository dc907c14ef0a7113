"""The page about the command line, and the schemas of what commands print as JSON."""

from __future__ import annotations

import json

from jsonschema import Draft202012Validator

from tests.processes.launch import ROOT

PAGE = (ROOT / "docs" / "command-line.md").read_text()


def check_schema(command: str, content: object) -> None:
    """The JSON of a command has the keys and the values that its schema describes."""
    schema = json.loads((ROOT / "docs" / "_static" / "schemas" / f"{command}.json").read_text())
    assert f"(_static/schemas/{command}.json)" in PAGE
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(content)
