"""Count what `house_gate.py` limits.

Words to avoid in docstrings, messages and names; fragments, siblings, rooms, names used twice, methods, circles.
"""

import ast
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import import_graph

GLOSSARY = "docs/glossary.md"
HEADING = "## Words to avoid"
SOURCE_FOLDERS = ("common/src", "csrc/src", "operator/src", "trainer/src", "analyzer/src")
PYTHON_FOLDERS = (*SOURCE_FOLDERS, "bench", "scripts", "tests")
MESSAGE_FOLDERS = (*SOURCE_FOLDERS, "scripts")
"""Trees whose strings users read: messages, hints, help, descriptions of fields and metrics."""
CROWDED_FOLDERS = (*SOURCE_FOLDERS, "csrc/include", "csrc/bindings", "frontend/src", "tests/support")
"""Trees in which the number of modules of a folder is limited; folders of tests are as large as what they test."""
MODULE_SUFFIXES = {".py", ".ts", ".vue", ".cpp", ".h", ".hpp"}
MOST_METHODS = 20

FRAGMENT = re.compile(r"(?:Of|They|It|That|Those|Who|What|Whether|Where)\b")
FRAGMENT_LENGTH = 3
CODE_SPAN = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
PROSE_TERM = re.compile(r"[A-Za-z']+")
PHRASE = re.compile(r"[A-Za-z]\s|\s[A-Za-z]")
"""Matches strings of several words, but no keys and names."""
NAME_TERM = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function
Binding = ast.Name | ast.Attribute | ast.arg | ast.alias | ast.ExceptHandler | ast.MatchAs
COUNTED_NODES = Documented | import_graph.Import | Binding | ast.Constant


class Offence(NamedTuple):
    """One place that a gate counts, under a key such as `trainer` or `trainer: told`."""

    key: str
    path: str
    line: int
    text: str


class Source(NamedTuple):
    """A Python file: its path relative to the root of the repository, and the nodes of its syntax tree that matter."""

    path: str
    nodes: list[ast.AST]

    @property
    def part(self) -> str:
        """Return the top-level folder."""
        return self.path.split("/", 1)[0]


class Docstring(NamedTuple):
    """A docstring, or the text below the assignment of a constant or field."""

    text: str
    line: int
    of_attribute: bool

    @property
    def prose(self) -> str:
        """Return the text with its code blanked out: code is quoted, not written in words."""
        return blank_code(self.text)


class Terms(NamedTuple):
    """Spellings to avoid: in docstrings and messages, and in names."""

    prose: frozenset[str]
    names: frozenset[str]


def read_sources(root: pathlib.Path) -> list[Source]:
    """Parse all Python files of ours."""
    paths = sorted(path for folder in PYTHON_FOLDERS for path in (root / folder).rglob("*.py"))
    return [read_source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def read_source(path: str, text: str) -> Source:
    """Parse a file and walk its tree once: walking takes longer than all that is counted."""
    nodes: list[ast.AST] = []
    docstring_ids: set[int] = set()
    for node in ast.walk(ast.parse(text)):  # a parent precedes its children
        match node:
            case ast.Expr(value=ast.Constant() as statement):
                docstring_ids.add(id(statement))
            case ast.Constant(value=str(string)) if id(node) not in docstring_ids and PHRASE.search(string):
                nodes.append(node)
            case ast.Constant():
                continue
            case _ if isinstance(node, COUNTED_NODES):
                nodes.append(node)
    return Source(path, nodes)


def read_terms(root: pathlib.Path) -> Terms:
    """Read the table of words to avoid; without a glossary there are none.

    Its columns are `Avoid` (spellings, separated by commas), `Write`, and optionally `Where`: `names` or `docstrings`
    if a spelling is right in the other ones.
    """
    path = root / GLOSSARY
    if not path.exists():
        return Terms(frozenset(), frozenset())
    section = path.read_text(encoding="utf-8").partition(f"{HEADING}\n")[2].split("\n## ")[0]
    rows = [_cells(line) for line in section.splitlines() if line.startswith("|")]
    if not rows or rows[0][:2] != ["avoid", "write"]:
        raise SystemExit(f"{GLOSSARY}: no table with the columns Avoid and Write below '{HEADING}'")
    prose: set[str] = set()
    names: set[str] = set()
    for avoid, _, *where in rows[2:]:
        spellings = {" ".join(spelling.split()) for spelling in avoid.split(",")} - {""}
        if where[:1] != ["names"]:
            prose |= spellings
        if where[:1] != ["docstrings"]:
            names |= spellings
    return Terms(frozenset(prose), frozenset(names))


def _cells(row: str) -> list[str]:
    return [cell.strip().lower() for cell in re.sub(r"[`*]", "", row).strip().strip("|").split("|")]


def _pattern(spellings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
    choices = "|".join(re.escape(spelling).replace(r"\ ", r"\s+") for spelling in longest_first)
    return re.compile(rf"\b(?:{choices})\b" if choices else r"(?!)", re.IGNORECASE)


def blank_code(text: str) -> str:
    """Replace code between backticks by spaces of equal length."""
    return CODE_SPAN.sub(lambda match: re.sub(r"\S", " ", match[0]), text)


def docstrings(source: Source) -> Iterator[Docstring]:
    for node in source.nodes:
        if not isinstance(node, Documented):
            continue
        for index, statement in enumerate(node.body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text), lineno=line)) if index == 0 or isinstance(
                    node.body[index - 1], ast.Assign | ast.AnnAssign
                ):
                    yield Docstring(text, line, index > 0)


def avoided_in_docstrings(sources: list[Source], spellings: frozenset[str]) -> Iterator[Offence]:
    pattern = _pattern(spellings)
    for source in sources:
        for docstring in docstrings(source):
            for match in pattern.finditer(docstring.prose):
                term = " ".join(match[0].lower().split())
                line = docstring.line + docstring.text[: match.start()].count("\n")
                yield Offence(f"{source.part}: {term}", source.path, line, f"'{term}' in a docstring")


def messages(source: Source) -> Iterator[tuple[str, int]]:
    """Yield strings of several words that are not docstrings, with code blanked out, and their lines.

    Of an f-string the parts between its values are strings.
    """
    if not source.path.startswith(tuple(f"{folder}/" for folder in MESSAGE_FOLDERS)):
        return
    for node in source.nodes:
        match node:
            case ast.Constant(value=str(text), lineno=line):
                yield blank_code(text), line


def avoided_in_messages(sources: list[Source], spellings: frozenset[str]) -> Iterator[Offence]:
    pattern = _pattern(spellings)
    for source in sources:
        for text, line in messages(source):
            for match in pattern.finditer(text):
                term = " ".join(match[0].lower().split())
                yield Offence(f"{source.part}: {term}", source.path, line, f"'{term}' in the text {text!r}")


def names_defined(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the names that a module gives, its own included, and their lines."""
    path = pathlib.PurePosixPath(source.path)
    yield (path.parent.name if path.stem == "__init__" else path.stem), 1
    for node in source.nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, node.lineno


def avoided_in_names(sources: list[Source], spellings: frozenset[str]) -> Iterator[Offence]:
    pattern = _pattern(spellings)
    for source in sources:
        for name, line in names_defined(source):
            for match in pattern.finditer(" ".join(NAME_TERM.findall(name))):
                term = match[0].lower()
                yield Offence(f"{source.part}: {term}", source.path, line, f"'{term}' in the name {name}")


def fragments(sources: list[Source]) -> Iterator[Offence]:
    """Yield docstrings that do not say enough; for a constant one word may be enough, such as its unit."""
    for source in sources:
        for docstring in docstrings(source):
            text = docstring.text.strip()
            short = len(text.split()) <= FRAGMENT_LENGTH and not docstring.of_attribute
            if short or FRAGMENT.match(text):
                first = text.partition("\n")[0]
                yield Offence(source.part, source.path, docstring.line, f"the docstring '{first}' is a fragment")


def siblings(root: pathlib.Path) -> Iterator[Offence]:
    paths = (path for folder in CROWDED_FOLDERS for path in (root / folder).rglob("*"))
    for path in sorted(path.relative_to(root) for path in paths if path.suffix in MODULE_SUFFIXES):
        if path.stem != "__init__" and ".test." not in path.name:
            yield Offence(path.parent.as_posix(), path.as_posix(), 1, f"one of the modules in {path.parent}")


def rooms(root: pathlib.Path) -> Iterator[Offence]:
    """Yield the folders and modules at the top of each distribution: what its reader sees first."""
    for folder in SOURCE_FOLDERS:
        for package in sorted((root / folder).glob("megatronapp_*/")):
            for path in sorted(package.iterdir()):
                is_module = path.suffix == ".py" and path.stem != "__init__"
                if is_module or (path.is_dir() and any(path.rglob("*.py"))):
                    place = path.relative_to(root).as_posix()
                    yield Offence(folder.split("/")[0], place, 1, f"at the top of {package.name}")


def classes(sources: list[Source]) -> Iterator[tuple[Source, ast.ClassDef]]:
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                yield source, node


def class_names(sources: list[Source]) -> Iterator[Offence]:
    for source, node in classes(sources):
        yield Offence(f"{source.part}: {node.name}", source.path, node.lineno, f"another class {node.name}")


def methods(sources: list[Source]) -> Iterator[Offence]:
    """Yield the methods of large classes; a property with its setter, or a method with its overloads, is one."""
    for source, node in classes(sources):
        first_lines: dict[str, int] = {}
        for statement in node.body:
            if isinstance(statement, Function):
                first_lines.setdefault(statement.name, statement.lineno)
        if len(first_lines) <= MOST_METHODS:
            continue
        key = f"{source.part}: {pathlib.PurePosixPath(source.path).stem}.{node.name}"
        for name, line in first_lines.items():
            yield Offence(key, source.path, line, f"method {name} of {node.name}")


def graphs(sources: list[Source]) -> Iterator[tuple[str, import_graph.Graph]]:
    for folder in SOURCE_FOLDERS:
        files = {source.path: source.nodes for source in sources if source.path.startswith(f"{folder}/")}
        yield folder.split("/", maxsplit=1)[0], import_graph.import_graph(files)


def module_circles(sources: list[Source]) -> Iterator[Offence]:
    for part, graph in graphs(sources):
        yield from _circles(part, graph)


def folder_circles(sources: list[Source]) -> Iterator[Offence]:
    """Yield the folders and modules of one package that import each other in a circle."""
    for _, graph in graphs(sources):
        for package in import_graph.packages(graph):
            yield from _circles(package, import_graph.children(graph, package))


def _circles(key: str, graph: import_graph.Graph) -> Iterator[Offence]:
    for component in import_graph.circles(graph):
        for node in component:
            imports = import_graph.imports_within(graph, node, component)
            first = min(imports.values())
            targets = ", ".join(f"{target} (line {place.line})" for target, place in imports.items())
            yield Offence(key, first.path, first.line, f"{node} is in a circle of {len(component)}: imports {targets}")


def count_everything(root: pathlib.Path, sources: list[Source], terms: Terms) -> dict[str, list[Offence]]:
    """Return for each gate what it counts."""
    return {
        "docstring words": list(avoided_in_docstrings(sources, terms.prose)),
        "messages": list(avoided_in_messages(sources, terms.prose)),
        "names": list(avoided_in_names(sources, terms.names)),
        "fragments": list(fragments(sources)),
        "siblings": list(siblings(root)),
        "rooms": list(rooms(root)),
        "class names": list(class_names(sources)),
        "methods": list(methods(sources)),
        "module circles": list(module_circles(sources)),
        "folder circles": list(folder_circles(sources)),
    }


def docstring_sizes(sources: list[Source]) -> Counter[str]:
    """Return the number of words in the docstrings of each part."""
    sizes: Counter[str] = Counter()
    for source in sources:
        sizes[source.part] += sum(len(PROSE_TERM.findall(docstring.prose)) for docstring in docstrings(source))
    return sizes


def message_sizes(sources: list[Source]) -> Counter[str]:
    """Return the number of words in the messages of each part."""
    sizes: Counter[str] = Counter()
    for source in sources:
        sizes[source.part] += sum(len(PROSE_TERM.findall(text)) for text, _ in messages(source))
    return sizes
