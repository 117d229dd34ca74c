"""The list of verbs. Each verb's file is small and imports only typer; the rooms below load when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from mtplab import __version__
from mtplab.cli import convert, demo, denoise, diverge, doctor, generate, head, inspect, probe, sweep

# Verbs in the order of the help text: the main job first.
VERBS = {
    "demo": demo.demo,
    "generate": generate.generate,
    "sweep": sweep.sweep,
    "diverge": diverge.diverge,
    "probe": probe.probe,
    "denoise": denoise.denoise,
    "inspect": inspect.inspect,
    "convert": convert.convert,
    "doctor": doctor.doctor,
}
GROUPS = {"head": ("Make MTP heads.", {"train": head.train})}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtplab {__version__}")
        raise typer.Exit()


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Version, and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (allowed anywhere).")] = False,
) -> None:
    """Decoders that commit several tokens per forward pass, measured against one token at a time."""


def build() -> typer.Typer:
    """The typer application. Plain help: rich would take a third of the start-up budget."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
    app.callback()(root)
    for name, verb in VERBS.items():
        app.command(name)(verb)
    for group, (help_, verbs) in GROUPS.items():
        inner = typer.Typer(help=help_, rich_markup_mode=None, add_completion=False, no_args_is_help=True)
        for name, verb in verbs.items():
            inner.command(name)(verb)
        # One command alone would be taken for the group itself.
        inner.callback()(lambda: None)
        app.add_typer(inner, name=group)
    return app
