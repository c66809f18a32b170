"""The training text: fenced Python, prose and tool calls, from files that come with Python and the venv.

Nothing is downloaded and none of the text is committed: the same seed with the same Python and the same
packages gives the same text.
"""

import ast
import importlib.util
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from textwrap import dedent
from typing import NamedTuple

from tool_calls import tool_document

CODE_BYTES = 2_600_000
PROSE_BYTES = 2_200_000
TOOL_BYTES = 600_000

SKIPPED_FOLDERS = {"test", "tests", "site-packages", "encodings", "idlelib", "lib2to3", "pydoc_data"}
# Packages of the venv with long docstrings, used as prose only.
PROSE_PACKAGES = ("numpy", "jax", "torch")

SNIPPET_BYTES = range(120, 1600)
PARAGRAPH_BYTES = range(80, 1000)

COMMENT_LINE = re.compile(r"^[ \t]*#.*\n", re.MULTILINE)
BLANK_LINES = re.compile(r"\n\s*\n")
# Sphinx roles such as :func:`~os.path.join`, of which only the name is prose.
ROLE = re.compile(r":[\w:]+:`[~!]?([^`<]*)[^`]*`")
MARKUP = re.compile(r"[*`]+")
NOT_CODE = re.compile(r"://|[^\n -~]")
NOT_PROSE = re.compile(r"://|>>>|[|{}\\<>=_]|-{3}|\.{4}|\[.*\]\(")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One source file."""

    lines: list[str]
    tree: ast.Module


def build_corpus(seed: int) -> list[str]:
    """Return the shuffled documents, in the shares that the byte budgets set."""
    rng = Random(seed)
    library = [*_modules(Path(sysconfig.get_path("stdlib")))]
    documents = [
        *_take(code_documents(library, rng), CODE_BYTES, rng),
        *_take(prose_documents(library, rng), PROSE_BYTES, rng),
        *tool_documents(TOOL_BYTES, rng),
    ]
    rng.shuffle(documents)
    return documents


def code_documents(library: list[Module], rng: Random) -> list[str]:
    """Return fenced functions and methods, one to three of a module together, most led by their summary."""
    documents = []
    for module in library:
        blocks = [_fenced(module, function, rng) for function in _functions(module.tree)]
        blocks = [block for block in blocks if len(block) in SNIPPET_BYTES and not NOT_CODE.search(block)]
        documents.extend(_runs(blocks, "", 3, rng))
    return documents


def prose_documents(library: list[Module], rng: Random) -> list[str]:
    """Return runs of paragraphs: the language reference, package descriptions, licences and docstrings."""
    seen: set[str] = set()
    documents = []
    for text in _prose_texts(library):
        fresh = [paragraph for paragraph in _paragraphs(text) if paragraph not in seen]
        seen.update(fresh)
        documents.extend(run + "\n" for run in _runs(fresh, "\n\n", 8, rng))
    return documents


def tool_documents(size: int, rng: Random) -> Iterator[str]:
    """Yield tool calls until about `size` bytes are out."""
    while size > 0:
        document = tool_document(rng)
        size -= len(document)
        yield document


def _take(documents: list[str], size: int, rng: Random) -> Iterator[str]:
    """Yield documents in random order until about `size` bytes are out."""
    rng.shuffle(documents)
    for document in documents:
        if size <= 0:
            return
        size -= len(document)
        yield document


def _runs(parts: list[str], separator: str, longest: int, rng: Random) -> Iterator[str]:
    """Cut a list into runs of random length and join each."""
    start = 0
    while start < len(parts):
        end = start + rng.randint(1, longest)
        yield separator.join(parts[start:end])
        start = end


def _modules(root: Path) -> Iterator[Module]:
    """Parse every module below a folder, in the order of their paths."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            source = path.read_text(encoding="utf-8", errors="replace")
            # Some files are for a newer Python, and old ones warn of invalid escapes.
            with warnings.catch_warnings(action="ignore"), suppress(SyntaxError):
                yield Module(source.splitlines(), ast.parse(source))


def _functions(tree: ast.Module) -> Iterator[Function]:
    """Yield the functions of a module and the methods of its classes, in the order of the file."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (item for item in node.body if isinstance(item, Function))


def _fenced(module: Module, function: Function, rng: Random) -> str:
    """Return a function in a fence, without docstring and comments, after its summary if it has one."""
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    lines = module.lines[first - 1 : function.end_lineno]
    docstring = ast.get_docstring(function)
    lead = ""
    if docstring:
        expression = function.body[0]
        del lines[expression.lineno - first : (expression.end_lineno or expression.lineno) - first + 1]
        summary = _plain(BLANK_LINES.split(docstring)[0])
        lead = summary + "\n" if len(summary) < 200 and rng.random() < 0.8 else ""
    code = COMMENT_LINE.sub("", dedent("\n".join(lines)) + "\n").strip("\n")
    return f"{lead}```python\n{code}\n```\n"


def _prose_texts(library: list[Module]) -> Iterator[str]:
    yield from topics.values()
    for distribution in sorted(distributions(), key=lambda found: found.name.lower()):
        yield distribution.read_text("METADATA") or ""
        for file in distribution.files or []:
            if "LICEN" in file.name.upper() and file.suffix in ("", ".txt", ".md"):
                path = Path(str(distribution.locate_file(file)))
                yield path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    yield from _docstrings(library)
    for package in PROSE_PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            yield from _docstrings(_modules(Path(root)))


def _docstrings(modules: Iterable[Module]) -> Iterator[str]:
    """Yield all docstrings of a module as one text, so that a document stays with one subject."""
    for module in modules:
        documented = Function | ast.ClassDef | ast.Module
        nodes = (node for node in ast.walk(module.tree) if isinstance(node, documented))
        yield "\n\n".join(ast.get_docstring(node) or "" for node in nodes)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs that read as sentences, each on one line."""
    for block in BLANK_LINES.split(text):
        paragraph = _plain(block)
        if (
            len(paragraph) in PARAGRAPH_BYTES
            and paragraph.isascii()
            and paragraph[0].isupper()
            and paragraph[-1] in ".:"
            and not NOT_PROSE.search(paragraph)
            and sum(letter.isalpha() or letter == " " for letter in paragraph) > 0.93 * len(paragraph)
        ):
            yield paragraph


def _plain(block: str) -> str:
    """Drop the markup and the line breaks of a paragraph."""
    return " ".join(MARKUP.sub("", ROLE.sub(r"\1", block)).split())
