"""Text of a growing row of tokens, and stop strings in it."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

REPLACEMENT = "�"  # how decoders show a character whose bytes have not all arrived


@runtime_checkable
class TextDecoder(Protocol):
    """What generation needs of a tokenizer."""

    def decode(self, ids: list[int], /) -> str:
        """Returns the text of the tokens."""
        ...


class TextStream:
    """Turns tokens into text as they come, in time independent of how many came before.

    A token alone has no text: a character may be spread over several tokens, and some tokenizers drop a leading space.
    So each step decodes a short window that starts at an earlier whole character, and returns what is new in it.
    """

    def __init__(self, tokenizer: TextDecoder):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that has been returned

    def push(self, token: int) -> str:
        """Adds a token; returns the text that has become certain, without an unfinished character at its end."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        piece = certain[len(self._shown) :]
        self._shown = self._shown + piece
        if piece and certain == text:
            self._window = self._window[-1:]
            self._shown = self._tokenizer.decode(self._window)
        return piece

    def flush(self) -> str:
        """Returns what was held back: the replacement characters of bytes that never became a character."""
        text = self._tokenizer.decode(self._window) if self._window else ""
        piece = text[len(self._shown) :]
        self._shown = self._shown + piece
        return piece


class Released(NamedTuple):
    """A token that is sure to be kept and the text that is sure to be shown with it."""

    token: int
    log_prob: float
    text: str


class StopStrings:
    """Holds tokens back while their text may still turn out to be part of a stop string.

    A stop string may begin and end inside tokens. Text before it is shown, itself and what follows is not. Tokens are
    kept up to the last one that holds text before the stop string, so the text of the kept tokens begins with the text
    shown and may run on into the stop string by part of a token.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str]):
        self._stream = stream
        self._stops = tuple(stops)
        self._held: deque[tuple[int, float, int]] = deque()  # token, log-probability, where its text starts
        self._text = ""  # text that has not been shown, and
        self._start = 0  # how much was shown before it

    def push(self, token: int, log_prob: float) -> tuple[list[Released], str | None]:
        """Adds a token; returns what may be shown now, and `None` as long as no stop string is complete.

        Otherwise nothing follows, and instead of `None` comes the text that belongs to none of the tokens returned: the
        end of an earlier one's.
        """
        self._held.append((token, log_prob, self._start + len(self._text)))
        self._text += self._stream.push(token)
        found = [at for at in (self._text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            end = self._start + min(found)
            released = self._release(min(found), before=True)
            return released, self._text[: end - self._start]
        return self._release(len(self._text) - self._possible_stop(), before=bool(self._stops)), None

    def flush(self) -> tuple[list[Released], str]:
        """Returns the tokens still held and text that belongs to none of them, when the row ends for another reason."""
        self._text += self._stream.flush()
        released = self._release(len(self._text), before=False)
        rest, self._text = self._text, ""
        return released, rest

    def _possible_stop(self) -> int:
        """Returns the length of the longest end of the text with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, size: int, *, before: bool) -> list[Released]:
        """Shows `size` characters with the tokens that start before their end (`before`), or with all that are held."""
        limit = self._start + size
        released = []
        while self._held and (not before or self._held[0][2] < limit):
            token, log_prob, _ = self._held.popleft()
            ends = self._held[0][2] if self._held else self._start + len(self._text)
            shown = min(limit, ends) - self._start
            released.append(Released(token, log_prob, self._text[:shown]))
            self._text, self._start = self._text[shown:], self._start + shown
        return released
