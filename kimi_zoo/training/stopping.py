"""Ctrl-C and SIGTERM between steps: a step that has begun is finished, since it reuses the memory of its state."""

import signal
import threading
from types import FrameType
from typing import Any, final


@final
class StopSignals:
    """Notes the first signal to stop while in the context; a second one interrupts at once.

    Signals reach the main thread alone: in another thread this does nothing.
    """

    def __init__(self):
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """**Raises:** `KeyboardInterrupt` if a signal came."""
        if self.asked:
            raise KeyboardInterrupt
