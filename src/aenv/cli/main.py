"""Entry point of `aenv`. Commands that run a node import it only when called, so that the client works where a server
cannot.
"""

import asyncio
import errno
import logging
import sys
from typing import Annotated

import typer

from aenv import __version__
from aenv.cli import host
from aenv.errors import AenvError
from aenv.settings import Settings

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""How a host says that it is read-only, full, or not ours."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_show_locals=False,  # settings and tokens are among them
    help="Reinforcement-learning environments as forkable microVMs.",
)

app.command()(host.doctor)
app.add_typer(host.assets, name="assets")


@app.command()
def server(
    listen: Annotated[str, typer.Option(help="HOST:PORT of the public listener.")] = "",
    keep_running: Annotated[bool, typer.Option("--keep-running", help="Leave sandboxes running at the stop.")] = False,
) -> None:
    """Run a node in the foreground until SIGTERM."""
    from aenv.server import serve

    settings = Settings(listen=listen) if listen else Settings()
    _configure_logs(settings.log_format)
    asyncio.run(serve(settings, keep_running=keep_running))


def _configure_logs(log_format: str) -> None:
    """Structured lines on standard error: for people on a terminal, JSON elsewhere."""
    import structlog

    people = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    # Neither form shows local variables: settings and tokens are among them.
    traceback: structlog.typing.Processor
    renderer: structlog.typing.Processor
    if people:
        traceback = structlog.dev.set_exc_info
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    else:
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        traceback = structlog.processors.ExceptionRenderer(transformer)
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            traceback,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


bench = typer.Typer(no_args_is_help=True, help="Measure this machine against the least it could do.")
app.add_typer(bench, name="bench")


@bench.command()
def lifecycle(
    rounds: Annotated[int, typer.Option(min=1, help="Times each operation is measured.")] = 10,
    forks: Annotated[str, typer.Option(help="Numbers of children, as in 1,4,16.")] = "1,4,16",
    json_output: Annotated[bool, typer.Option("--json", help="Print figures for machines.")] = False,
) -> None:
    """Create, pause, resume, snapshot and fork, beside a bare VMM in the same run. Needs root."""
    from aenv.bench.lifecycle import measure
    from aenv.bench.report import as_json, print_table
    from aenv.server import require_root

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    require_root()
    try:
        counts = sorted({int(count) for count in forks.split(",") if count.strip()})
    except ValueError as error:
        raise typer.BadParameter(f"{forks!r} is not a list of numbers", param_hint="--forks") from error
    conditions, comparisons = asyncio.run(measure(rounds, counts, progress))
    if json_output:
        print(as_json(conditions, comparisons))
    else:
        print_table(conditions, comparisons)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Run the command line; an expected error ends with its message and hint, without a traceback."""
    try:
        app()
    except AenvError as error:
        print(f"aenv: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        print(f"aenv: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("aenv."):
            raise
        print(f"aenv: this command needs the module {error.name}\n  install aenv[server]", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
