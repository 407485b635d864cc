"""Commands about this host: `aenv doctor`, `aenv assets`."""

import asyncio
import sys
from typing import Annotated

import typer

from aenv.cli.output import Output, show
from aenv.settings import Settings

OutputOption = Annotated[Output | None, typer.Option(help="table or json; default: table on a terminal.")]

assets = typer.Typer(no_args_is_help=True, help="Guest kernel, initramfs and base image.")


def doctor(output: OutputOption = None) -> None:
    """Say what this host can do, what is missing, and the remedy. Ends 1 when something needed is missing."""
    from aenv.doctor import Verdict, run

    findings = run(Settings())
    marks = {Verdict.OK: "[green]ok[/green]", Verdict.WARNING: "[yellow]warning[/yellow]"}
    show(
        output,
        [finding.to_json() for finding in findings],
        ["", "what", "found", "remedy"],
        [[marks.get(f.verdict, "[red]missing[/red]"), f.what, f.detail, f.remedy] for f in findings],
    )
    if any(finding.verdict is Verdict.MISSING for finding in findings):
        raise typer.Exit(1)


@assets.command()
def build(
    refresh: Annotated[bool, typer.Option("--refresh", help="Rebuild from today's packages.")] = False,
) -> None:
    """Build what is missing in the cache."""
    from aenv.guest.assets import ensure_assets

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    built = asyncio.run(ensure_assets(Settings(), progress, refresh=refresh))
    print(f"kernel {built.kernel_version}, envd {built.envd_version}, base image {built.base_key}")


@assets.command()
def status(output: OutputOption = None) -> None:
    """Say what is in the cache."""
    from aenv.guest.assets import asset_status

    found = asset_status(Settings())
    show(
        output,
        [{"name": s.name, "path": str(s.path), "present": s.present, "sizeBytes": s.size_bytes} for s in found],
        ["asset", "state", "MiB", "path"],
        [[s.name, "there" if s.present else "not built", s.size_bytes >> 20, s.path] for s in found],
    )
