"""`mtplab doctor`: device, BLAS, compiler, memory, power, known-bad versions, and what to do about each."""

from __future__ import annotations

from mtplab.cli.options import Output, check_format, out


def doctor(output: Output = "table") -> None:
    """Check this machine and say what to do about what is wrong."""
    check_format(output)
    from mtplab.backend.doctor import checks
    from mtplab.report.render import checks as shown

    out(shown(checks(), output))
