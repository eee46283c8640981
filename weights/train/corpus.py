"""Text for the bundled model: what comes with every Python.

Three kinds of documents, each of plain text:

- source files of the standard library (no test suites, no generated tables, nothing of `site-packages`);
- the language reference's topics that `help()` shows (`pydoc_data.topics`);
- docstrings of the modules written in C, which have no source file to read them from.

Which documents are held out is decided by a hash of the document's name, so that it does not depend on the order, the
number or the contents of the others. Documents that repeat an earlier one are dropped before the split, so that
no held-out text has a near copy among the training text.

Run as `python weights/train/corpus.py FOLDER`; writes `train.jsonl`, `held_out.jsonl` and `corpus.json` into FOLDER.
"""

import argparse
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LEFT_OUT_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__", "_bundled", "pydoc_data"}
LEFT_OUT_FILES = {"html/entities.py", "stringprep.py"}  # tables
TABLE_MARKS = ("decoding_table", "decoding_map")  # the generated character maps of `encodings`
LONGEST_LINE = 1000  # a longer one is data
HELD_OUT_SHARE = 0.05
REPEATED_SHARE = 0.5  # a document with more of its lines than this in one earlier document is a near copy


class Document(NamedTuple):
    """One text of the corpus and the name that decides whether it is held out."""

    name: str
    text: str


def source_documents(folder: Path) -> Iterator[Document]:
    """Python files below `folder`, by name; files of data, tests and build settings are passed over."""
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        parents = set(Path(name).parent.parts)
        if parents & LEFT_OUT_FOLDERS or name in LEFT_OUT_FILES:
            continue
        if name.startswith(("_sysconfigdata", "config-")):  # the settings this interpreter was built with
            continue
        text = path.read_text("utf-8", errors="replace")
        if "�" in text or any(mark in text for mark in TABLE_MARKS):
            continue
        if max(map(len, text.splitlines()), default=0) <= LONGEST_LINE:
            yield Document(name, text)


def topic_documents() -> Iterator[Document]:
    """The language reference as `help()` shows it, one document per topic."""
    topics = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield Document(f"topics/{name}.txt", topics[name])


def builtin_documents() -> Iterator[Document]:
    """Docstrings of the modules written in C: of the module, its functions, its classes and their methods."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith(("_test", "_xx", "xx", "_sysconfigdata")) or name in ("this", "antigravity"):
            continue
        if name not in sys.builtin_module_names and not is_extension(name):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                module = importlib.import_module(name)
        except ImportError:
            continue
        yield Document(f"builtin/{name}.txt", "\n\n".join(module_docstrings(module)))


def is_extension(name: str) -> bool:
    """Whether the standard library module `name` is a compiled file."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)


def module_docstrings(module) -> Iterator[str]:
    """Title and docstring of a module and of everything public in it, each text once."""
    seen = set()

    def entry(title: str, value) -> Iterator[str]:
        text = inspect.getdoc(value)
        if text and text not in seen:
            seen.add(text)
            yield f"{title}\n" + "\n".join(f"    {line}".rstrip() for line in text.splitlines())

    yield from entry(module.__name__, module)
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not callable(value):
            continue
        yield from entry(f"{module.__name__}.{name}{signature(value)}", value)
        if inspect.isclass(value):
            for member, method in sorted(vars(value).items()):
                if not member.startswith("_"):
                    yield from entry(f"{module.__name__}.{name}.{member}{signature(method)}", method)


def signature(value) -> str:
    """`(a, b=1)`, or nothing where the function doesn't tell."""
    text = (getattr(value, "__text_signature__", None) or "") if callable(value) else ""
    return text.replace("$module, /, ", "").replace("$module, /", "").replace("$module, ", "").replace("$", "")


def without_near_copies(documents: Iterable[Document]) -> Iterator[Document]:
    """Drops every document most of whose longer lines stand in one earlier document."""
    holders: dict[str, list[int]] = {}
    for index, document in enumerate(documents):
        lines = {line.strip() for line in document.text.splitlines()}
        lines = {line for line in lines if len(line) >= 16}
        shared: dict[int, int] = {}
        for line in lines:
            for holder in holders.get(line, ()):
                shared[holder] = shared.get(holder, 0) + 1
        if max(shared.values(), default=0) > REPEATED_SHARE * len(lines) or not document.text.strip():
            continue
        for line in lines:
            holders.setdefault(line, []).append(index)
        yield document


def is_held_out(name: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether the document of this name is held out: its hash, as a fraction of the largest one, is below `share`."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def collect() -> list[Document]:
    """All documents of the running interpreter, near copies dropped, line ends made `\\n`; longest first wins."""
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = [*source_documents(library), *topic_documents(), *builtin_documents()]
    documents = [Document(name, text.replace("\r\n", "\n").strip("\n") + "\n") for name, text in documents]
    longest_first = sorted(documents, key=lambda document: (-len(document.text), document.name))
    return sorted(without_near_copies(longest_first))


def build(folder: Path) -> dict:
    """Writes `train.jsonl`, `held_out.jsonl` (objects with `name` and `text`) and `corpus.json` into `folder`.

    Returns what `corpus.json` says: the Python version and, per part, documents, bytes of text and SHA-256.
    """
    folder.mkdir(parents=True, exist_ok=True)
    documents = collect()
    report: dict = {"python": platform.python_version()}
    for part, held_out in (("train", False), ("held_out", True)):
        chosen = [document for document in documents if is_held_out(document.name) == held_out]
        lines = [json.dumps(document._asdict(), ensure_ascii=False) + "\n" for document in chosen]
        content = "".join(lines).encode()
        (folder / f"{part}.jsonl").write_bytes(content)
        report[part] = {
            "documents": len(chosen),
            "bytes": sum(len(document.text.encode()) for document in chosen),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    (folder / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def read(path: Path) -> list[Document]:
    """Documents of a file that `build` wrote."""
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the corpus")
    print(json.dumps(build(parser.parse_args().folder), indent=2))
