"""Chat templates: Jinja sources that come with a checkpoint, rendered in a sandbox."""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, final

from kimi_zoo.checkpoints.files import CheckpointError, read_json

_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # characters that no text has a meaning for
TURN_BEGINS, TURN_ENDS = "\U00100000", "\U00100001"  # rendered around what `{% generation %}` encloses


def read_chat_template(folder: Path) -> str | None:
    """Returns the source of `chat_template.jinja`, or else the default template of `tokenizer_config.json`, if any.

    **Raises:** `CheckpointError` if the file is not text.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from None
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.exists() else None
    if isinstance(template, list):  # several, by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


@final
class Mask:
    """Hides in messages what spells a control token, so that those in the rendered text are the template's own.

    The first character of each such spelling becomes a private-use one that occurs nowhere else.
    """

    def __init__(self, pattern: re.Pattern[str], *, avoid: Any):
        """**Arguments:**

        - `pattern`: finds the control tokens.
        - `avoid`: strings, or nested values with strings, whose characters are not used as stand-ins.
        """
        self._pattern = pattern
        present = set().union(*_strings(avoid))
        self._free = (chr(code) for code in _PRIVATE_USE if chr(code) not in present)
        self._stand_ins: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """Returns the same messages with every string in them made harmless."""
        if isinstance(value, str):
            while self._pattern.search(value):  # again, for names that overlap
                value = self._pattern.sub(lambda match: self._stand_in(match[0][0]) + match[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {key: self.hide(entry) for key, entry in value.items()}
        return [self.hide(entry) for entry in value] if isinstance(value, list | tuple) else value

    def restore(self, text: str) -> str:
        """Returns `text` with the hidden characters put back."""
        return text.translate({ord(stand_in): original for original, stand_in in self._stand_ins.items()})

    def _stand_in(self, character: str) -> str:
        if character not in self._stand_ins:
            self._stand_ins[character] = next(self._free)
        return self._stand_ins[character]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)


def render(source: str, names: Mapping[str, Any]) -> str:
    """Renders the template `source` with the variables `names`.

    **Raises:** `ValueError` if the template is not valid, asks for what the sandbox forbids, or refuses the messages.
    """
    import jinja2

    try:
        return _compiled(source).render(names)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"The chat template is not valid Jinja, line {error.lineno}: {error.message}.") from None
    except (jinja2.TemplateError, TypeError) as error:  # a message that lacks something fails in an expression
        raise ValueError(f"The chat template cannot take these messages: {error}.") from None


@functools.cache
def _compiled(source: str):
    """A template in a sandbox that keeps it from changing what it is given, with the helpers that templates expect."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` around what the assistant wrote, which training learns: rendered between two marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            mark = lambda text: nodes.Output([nodes.TemplateData(text)], lineno=line)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [mark(TURN_BEGINS), *body, mark(TURN_ENDS)]

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
