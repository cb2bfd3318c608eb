"""Imports between the modules of one distribution, and the circles among them."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

Import = ast.Import | ast.ImportFrom


class Place(NamedTuple):
    """Position of an import statement."""

    path: str
    line: int


Graph = Mapping[str, Mapping[str, Place]]
"""For each module (or package) those that it imports, each with the first place of such an import."""


def module_name(path: str) -> str:
    """Return the dotted name of a file below a `src` folder, such as `trainer/src/megatronapp_trainer/signals.py`."""
    below = path.partition("/src/")[2] or path
    return below.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def import_graph(files: Mapping[str, Iterable[ast.AST]]) -> dict[str, dict[str, Place]]:
    """Build the graph of files, given by their paths and the nodes of their syntax trees.

    Imports inside functions and under `TYPE_CHECKING` are included: a reader has to follow those, too.
    """
    modules = {module_name(path) for path in files}
    graph: dict[str, dict[str, Place]] = {name: {} for name in sorted(modules)}
    for path, nodes in files.items():
        importer = module_name(path)
        package = importer if path.endswith("__init__.py") else importer.rpartition(".")[0]
        for target, line in _imported(nodes, package, modules):
            if target != importer:
                graph[importer].setdefault(target, Place(path, line))
    return graph


def _imported(nodes: Iterable[ast.AST], package: str, modules: set[str]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if not isinstance(node, Import):
            continue
        prefix = f"{_absolute(node, package)}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            if target := _longest_known(prefix + alias.name, modules):
                yield target, node.lineno


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the module that a `from ... import` names, with its leading dots resolved."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: package.count(".") + 2 - node.level]
    return ".".join([*parents, node.module] if node.module else parents)


def _longest_known(name: str, modules: set[str]) -> str | None:
    """Return the module that an import of a name loads: the name may be one of a class or function in it."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def children(graph: Graph, package: str) -> dict[str, dict[str, Place]]:
    """Collapse the graph to the modules and folders directly in a package, without what it imports from elsewhere."""
    inside = {name: _child(name, package) for name in graph if name.startswith(f"{package}.")}
    collapsed: dict[str, dict[str, Place]] = {child: {} for child in inside.values()}
    for importer, child in inside.items():
        for target, place in graph[importer].items():
            other = inside.get(target, child)
            if other != child:
                collapsed[child].setdefault(other, place)
    return collapsed


def _child(name: str, package: str) -> str:
    return name.removeprefix(f"{package}.").split(".")[0]


def packages(graph: Graph) -> list[str]:
    """Return the packages, which are the names that others begin with."""
    return sorted({name.rpartition(".")[0] for name in graph} - {""})


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of two and more, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def search(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in graph[node]:
            if target not in order:
                search(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            start = stack.index(node)
            found.append(sorted(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in order:
            search(node)
    return [component for component in found if len(component) > 1]


def imports_within(graph: Graph, node: str, component: Iterable[str]) -> dict[str, Place]:
    """Return the imports by which a node takes part in a circle."""
    members = set(component)
    return {target: place for target, place in graph[node].items() if target in members}
