"""mlx-lm's architectures without mlx-lm's start-up.

`import mlx_lm` pulls in transformers (and torch where installed): two to five seconds before the first token, in
every fresh process. The architectures in `mlx_lm.models` need none of it. `light()` therefore registers the
package with its real path but runs its `__init__` only when somebody asks for an attribute of it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from mtplab.errors import ModelError
from mtplab.models.families import NO_TRUNK, VLM

# Families whose class is simply mlx_lm.models.<model_type>: no need to ask mlx-lm's remapping tables.
DIRECT = frozenset({"llama", "mimo", "qwen2", "qwen3", "qwen3_5", "qwen3_next", "gemma3_text", "deepseek_v3"})


def light(package: str = "mlx_lm") -> None:
    """Make the package's `models` importable without executing its `__init__.py` (idempotent)."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.loader is None:
        name = package.replace("_", "-")
        raise ModelError(f"{name} is not installed; run `pip install {name}`")
    module = types.ModuleType(package)
    module.__spec__, module.__file__ = spec, spec.origin
    module.__path__ = list(spec.submodule_search_locations or [])

    def __getattr__(name: str) -> Any:
        if name.startswith("__") or "__getattr__" not in module.__dict__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        del module.__dict__["__getattr__"]
        spec.loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    sys.modules[package] = module


def classes(config: dict[str, Any]) -> tuple[type, type]:
    """`(Model, ModelArgs)` of a checkpoint's config, as mlx-lm would choose them."""
    light()
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(f"config.json has model_type {kind!r}; it must name an architecture of mlx-lm")
    if (why := no_trunk(kind)) is not None:
        raise ModelError(why)
    try:
        if kind in VLM:
            from mtplab.models import vlm

            return vlm.classes(config)
        if kind in DIRECT:
            module = importlib.import_module(f"mlx_lm.models.{kind}")
            return module.Model, module.ModelArgs
        return importlib.import_module("mlx_lm.utils")._get_classes(config)
    except (ImportError, ValueError) as error:
        raise ModelError(f"model_type {kind!r} is not an architecture of the installed mlx-lm") from error


def no_trunk(kind: Any) -> str | None:
    """Why no installed package has a trunk for this model_type, in one sentence; None where one may have. Imports
    nothing."""
    if kind not in VLM:
        return NO_TRUNK.get(kind) if isinstance(kind, str) else None
    found = importlib.util.find_spec("mlx_vlm")
    folders = [] if found is None else [Path(p) for p in found.submodule_search_locations or []]
    if any((folder / "models" / kind / "__init__.py").is_file() for folder in folders):
        return None
    here = f"mlx-vlm {_version('mlx-vlm')} is installed and has none" if folders else "mlx-vlm is not installed"
    return (
        f"model_type {kind!r} is {VLM[kind]}, for which mlx-lm {_version('mlx-lm')} has no trunk but mlx-vlm 0.7.10 "
        f"has: run `pip install 'mtplab[vlm]'` ({here})"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def load(folder: Path, without: set[str], trust_remote_code: bool) -> Any:
    """mlx-lm's own loader, on the checkpoint without the tensors named in `without`.

    An architecture drops its MTP tensors in `sanitize`, but not all drop all of them (a layer number is fixed in one,
    a prefix of a number in another): they are taken away before it, on this instance.
    """
    from mlx_lm.utils import load_model

    from mtplab.models import layouts

    def prepare(weights: dict[str, Any]) -> dict[str, Any]:
        # Published also with numbered experts and with `.weight`; mlx-lm takes only the bare fused names.
        kind = read.get("model_type") or ""
        return layouts.experts(weights, (), "") if kind.startswith("qwen3_5_moe") else weights

    read: dict[str, Any] = {}

    def get_classes(config: dict[str, Any]) -> tuple[Any, type]:
        model_class, args_class = classes(config)
        read.update(config)

        def build(args: Any) -> Any:
            model = model_class(args)
            own = getattr(model, "sanitize", lambda weights: weights)
            model.sanitize = lambda weights: own(prepare({n: a for n, a in weights.items() if n not in without}))
            return model

        return build, args_class

    model, _ = load_model(folder, lazy=True, get_model_classes=get_classes, trust_remote_code=trust_remote_code)
    del model.sanitize
    return model


def cache_module() -> types.ModuleType:
    light()
    return importlib.import_module("mlx_lm.models.cache")
