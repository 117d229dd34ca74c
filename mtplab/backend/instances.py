"""Another behaviour for one module instance, without touching its class or its place in the parameter tree.

The instance gets a one-off subclass of its own class whose methods go through a list of calls; every other instance,
every parameter path and every `isinstance` stays as it was. Calls come and go in any order; with the last of them
gone the instance has its own class back. This is the one place where modules are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# call(inner, *args, **kwargs) -> result; `inner` is what would have run without it.
Call = Callable[..., Any]


def override(module: Any, call: Call, method: str = "__call__") -> Callable[[], None]:
    """From now on `module.method(...)` runs `call(inner, ...)`; a later override is outside an earlier one.

    Returns the function that takes it away again (once; a second time does nothing).
    """
    calls = _calls(module)
    entry = (method, call)
    calls.append(entry)
    if method not in type(module).__dict__:
        setattr(type(module), method, _method(calls, method, getattr(_own_class(module), method)))

    def restore() -> None:
        if any(e is entry for e in calls):
            calls[:] = [e for e in calls if e is not entry]
            if not calls and getattr(type(module), "_calls", None) is calls:
                module.__class__ = _own_class(module)

    return restore


def _own_class(module: Any) -> type:
    return getattr(type(module), "_own", None) or type(module)


def _calls(module: Any) -> list[tuple[str, Call]]:
    """The calls of this instance; its one-off class is made at the first."""
    if "_calls" not in type(module).__dict__:
        own = type(module)
        one_off = type(own.__name__, (own,), {"_own": own, "_calls": [], "__qualname__": own.__qualname__})
        one_off.__module__ = own.__module__
        module.__class__ = one_off
    return type(module)._calls


def _method(calls: list[tuple[str, Call]], name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def run(depth: int, chain: list[Call], self: Any, args: tuple, kwargs: dict) -> Any:
        if depth == 0:
            return own(self, *args, **kwargs)
        return chain[depth - 1](lambda *a, **k: run(depth - 1, chain, self, a, k), *args, **kwargs)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        chain = [call for wanted, call in calls if wanted == name]
        return run(len(chain), chain, self, args, kwargs)

    return method


def overridden(module: Any) -> list[Call]:
    """The calls in force on this instance, innermost first."""
    return [call for _, call in type(module).__dict__.get("_calls", [])]
