"""Fast paths, each beside a plain-`mx` twin and a numpy reference with the same results.

The sources lie in the folder `kernels/` at the top of the repository. An installed mtplab has them in this
folder; in a checkout this package looks there as well, so that a checkout on PYTHONPATH, an editable install and
a wheel all offer `mtplab.kernels.accept`. The name `kernels` alone belongs to another distribution: see
`kernels/__init__.py`.
"""

from pathlib import Path as _Path

_sources = _Path(__file__).resolve().parents[2] / "kernels"
# Next to an installed mtplab, `kernels` would be that other distribution: its folder holds none of our files.
if (_sources / "accept" / "plain.py").is_file():
    __path__.append(str(_sources))
