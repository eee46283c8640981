"""Makes `docstrings.jsonl`: functions of Equinox, Optax and JAX, each as a prompt (its signature) and a completion (its
docstring's first paragraph). All three are under the Apache 2.0 licence.

    uv run examples/data/make.py
"""

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("equinox", "optax", "jax")
LONGEST = 600  # characters of a completion
MOST = 900  # rows


def functions(package: str) -> Iterator[tuple[str, str]]:
    """Signature and first paragraph of the docstring of every public function of a package."""
    spec = importlib.util.find_spec(package)
    for file in sorted(Path(spec.origin).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                if 30 <= len(text) <= LONGEST and text.isascii():
                    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                    yield f"def {node.name}({ast.unparse(node.args)}){result}:\n", text


def main() -> None:
    """Writes the file beside this script."""
    rows = {}
    for package in PACKAGES:
        for prompt, text in functions(package):
            if len(prompt) <= LONGEST:
                rows.setdefault(text, {"prompt": prompt, "completion": f'    """{text}\n    """\n'})
    lines = [json.dumps(row) + "\n" for row in rows.values()]
    chosen = lines[:: max(1, len(lines) // MOST)][:MOST]
    (Path(__file__).parent / "docstrings.jsonl").write_text("".join(chosen))
    print(f"{len(chosen)} rows of {len(lines)}")


if __name__ == "__main__":
    main()
