"""A stream of new tokens as a command shows it: text as it comes, samples as JSON, how long it took."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from kimi_zoo.cli.runtime import CompileClock
from kimi_zoo.cli.terminal import Status, dim, is_terminal, printable


class StopWatch:
    """Notes when tokens come."""

    def __init__(self, samples: int):
        self.tokens = 0
        self._samples = samples
        self._first = self._last = time.perf_counter()

    def watching(self, events: Iterator[Any]) -> Iterator[Any]:
        """The same events."""
        for event in events:
            self._last = time.perf_counter()
            if self.tokens == 0:
                self._first = self._last
            self.tokens += event.token is not None
            yield event
        self._last = time.perf_counter()

    def timings(self, clock: CompileClock, started: float, loaded: float) -> dict[str, float | None]:
        """Seconds, and tokens per second after the first of each sample, without the time spent on compiling."""
        later = self.tokens - self._samples
        running = self._last - self._first - clock.between(self._first, self._last)
        return {
            "load_s": round(loaded - started, 4),
            "first_token_s": round(self._first - loaded, 4),
            "total_s": round(self._last - started, 4),
            "compile_s": round(clock.between(started, self._last), 4),
            "tokens_per_s": round(later / running, 2) if later > 0 and running > 0 else None,
        }


def collect(events: Iterable[Any], count: int, seed: int) -> list[dict[str, Any]]:
    """What each sample has become."""
    samples = [
        {"text": "", "tokens": [], "log_probs": [], "finish_reason": None, "seed": seed + number}
        for number in range(count)
    ]
    for event in events:
        sample = samples[event.row]
        sample["text"] += event.text
        if event.token is not None:
            sample["tokens"].append(event.token)
            sample["log_probs"].append(round(event.log_prob, 6))
        sample["finish_reason"] = event.finish_reason
    return samples


def print_stream(events: Iterable[Any], prompt: str, count: int, status: Status) -> None:
    """Prints the text of the events as it comes: the first sample's at once, a later one's when those before it are
    complete."""
    terminal = is_terminal(sys.stdout)
    show = printable if terminal else lambda text: text
    waiting = [""] * count
    ended = [False] * count
    current = -1

    def head(number: int) -> str:
        title = f"--- sample {number + 1} of {count} ---\n" if count > 1 else ""
        return title + (dim(show(prompt)) if terminal and prompt else "")

    for event in events:
        waiting[event.row] += event.text
        ended[event.row] |= event.finish_reason is not None
        if current < 0:
            status.clear()
            current = 0
            print(head(0), end="")
        while current < count:
            print(show(waiting[current]), end="", flush=True)
            waiting[current] = ""
            if not ended[current]:
                break
            print(flush=True)
            current += 1
            if current < count:
                print(head(current), end="")


def closing_line(tokens: int, timings: dict[str, float | None]) -> str:
    """What a person wants to know afterwards."""
    speed = "" if timings["tokens_per_s"] is None else f", {timings['tokens_per_s']:.1f} tokens/s"
    return (
        f"[{tokens} token{'s' * (tokens != 1)}{speed}; first token after {timings['first_token_s']:.2f} s, "
        f"loaded in {timings['load_s']:.2f} s; {timings['compile_s']:.2f} s of all that compiling]"
    )
