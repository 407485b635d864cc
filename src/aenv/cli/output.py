"""How commands print: tables for people, JSON for machines."""

import json
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


def choose(output: Output | None) -> Output:
    """What was asked for, else a table on a terminal and JSON in a pipe."""
    if output is not None:
        return output
    return Output.TABLE if sys.stdout.isatty() else Output.JSON


def show(output: Output | None, value: Any, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print `value` as JSON, or `rows` as a table."""
    if choose(output) is Output.JSON:
        print(json.dumps(value, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")  # a path cut short is of no use
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console().print(table)
