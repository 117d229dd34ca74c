"""Not the distribution `kernels`: this file keeps a bare `import kernels` from finding the folder it lies in.

`kernels` is a distribution that transformers looks for. Python offers any folder of that name under the working
directory, with or without an `__init__.py`, so the repository's own folder has to step aside by itself:

- where the real distribution is installed, `import kernels` gives that one;
- where it is not, `import kernels` fails as it would anywhere else (ModuleNotFoundError);
- transformers' availability check imports what `find_spec` has found and lets an ImportError escape, which would
  break `import transformers` in this directory; it alone gets an empty module of version 0: "not available".

The kernels themselves are `mtplab.kernels` (see `mtplab/kernels/__init__.py`); this file is never installed.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _is_checkout(entry):
    """Whether a folder of sys.path is an mtplab checkout (this one or another)."""
    return (Path(entry or ".") / "kernels" / "accept" / "plain.py").is_file()


def _real_spec():
    """Where the real distribution is, or None: every finder is asked, with all checkouts left out of the path."""
    path = [entry for entry in sys.path if not _is_checkout(entry)]
    for finder in sys.meta_path:
        # The finders of editable installs take no path of ours; they know their own places.
        spec = finder.find_spec("kernels", path if finder is PathFinder else None)
        if spec is not None and spec.has_location and not _is_checkout(Path(spec.origin).parents[1]):
            return spec
    return None


def _asked_by():
    """Name of the module whose import statement or import_module call has brought us here."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] not in ("importlib", "_frozen_importlib"):
            return name
        frame = frame.f_back
    return ""


def _step_aside():
    spec = _real_spec()
    if spec is not None:
        module = sys.modules["kernels"] = module_from_spec(spec)
        spec.loader.exec_module(module)
        return
    if not _asked_by().startswith("transformers."):
        raise ModuleNotFoundError("No module named 'kernels'", name="kernels")
    __path__.clear()


def __getattr__(name):
    if name != "__version__":
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    # The check has what it came for; from here on `import kernels` fails again.
    sys.modules.pop("kernels", None)
    return "0"


_step_aside()
