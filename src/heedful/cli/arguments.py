"""What several commands ask for in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["DEMO", "AsJson", "Model", "Text", "TextFile"]

DEMO = "demo"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder; demo is a small MiniLM.")]
Text = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="What the model reads; - for standard input.", show_default="a sentence"),
]
TextFile = Annotated[Path | None, typer.Option(help="Read the text from this file instead.")]
