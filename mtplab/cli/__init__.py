"""The command line: `mtplab VERB ...`. One file per verb; nothing heavy is imported until a verb runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mtplab.errors import MtplabError

PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended


class ReaderLeft(Exception):
    """Nobody reads the result any more. Not an OSError: typer would turn that into an exit code of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 2 wrong request, 3 wrong model or file, 4 some trials failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = _take_debug(arguments)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except (BrokenPipeError, ReaderLeft):
        _swallow_stdout()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    except MtplabError as error:
        if debug:
            raise
        return _complain(str(error), error.code)
    except Exception as error:
        if debug:
            raise
        return _unexpected(error)


def _take_debug(arguments: list[str]) -> bool:
    """`--debug` is welcome anywhere before a bare `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" not in arguments[:end]:
        return False
    arguments.remove("--debug")
    return True


def _run(arguments: list[str]) -> int:
    from mtplab.cli.app import build

    code = build()(args=arguments, prog_name="mtplab", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception) -> int:
    # Usage errors of the parser bring their own sentence; typer has had them in more than one module.
    if hasattr(error, "format_message"):
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        return _complain(_hinted(error), getattr(error, "exit_code", 2))
    if isinstance(error, OSError):
        from mtplab.trials.files import sentence

        return _complain(sentence(error, error.filename or "the output"), 2)
    return _complain(
        f"{type(error).__name__}: {' '.join(str(error).split())} (a fault of mtplab; --debug shows where)", 1
    )


def _hinted(error: Exception) -> str:
    text = error.format_message().rstrip(".")
    path = getattr(getattr(error, "ctx", None), "command_path", "mtplab")
    return f"{text}; see {path} --help"


def _complain(text: str, code: int) -> int:
    try:
        print(f"mtplab: {text}", file=sys.stderr)
    except OSError:
        _swallow_stdout()
    return code


def _swallow_stdout() -> None:
    """Nobody reads any more: send what is left nowhere, so that the interpreter does not complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
