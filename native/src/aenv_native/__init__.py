"""The Rust programs of AgentENV as package data: where to find them, and nothing else."""

from pathlib import Path
from typing import Literal

Program = Literal["envd", "blockd", "edge"]


def program(name: Program) -> Path:
    """Path of a program.

    Raises:
        FileNotFoundError: the distribution was installed without it (a source checkout before `make setup`).
    """
    path = Path(__file__).parent / "bin" / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: run `make setup`, or install the aenv-native wheel")
    return path
