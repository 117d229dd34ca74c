"""Where a request ends: EOS, stop strings, the token cap; also inside a block of accepted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtplab.decode.settings import Settings


class Stops:
    """Counts emitted tokens and cuts a block. `eos_ids` are ignored where the settings say so."""

    def __init__(
        self,
        settings: Settings,
        eos_ids: frozenset[int] = frozenset(),
        decode: Callable[[list[int]], str] | None = None,
    ):
        if settings.stop and decode is None:
            raise ValueError("stop strings need a decode function")
        self.settings, self.decode = settings, decode
        self.eos_ids = frozenset() if settings.ignore_eos else eos_ids
        self.emitted = 0
        # A stop string of n bytes spans at most n tokens that carry text; a few more for special tokens.
        self._window = 8 + max((len(s.encode()) for s in settings.stop), default=0)
        self._tail: list[int] = []

    def cut(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """How many of these committed tokens are emitted (at least one), and what cut them, if anything did."""
        for n, token in enumerate(tokens, 1):
            self.emitted += 1
            if token in self.eos_ids:
                return n, "eos"
            if self.settings.stop and self._stopped(token):
                return n, "stop"
            if self.emitted >= self.settings.max_tokens:
                return n, "cap"
        return len(tokens), None

    def _stopped(self, token: int) -> bool:
        self._tail = [*self._tail, token][-self._window :]
        text = self.decode(self._tail)
        return any(s in text for s in self.settings.stop)
