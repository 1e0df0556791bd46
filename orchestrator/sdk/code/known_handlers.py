"""Find the updates and signals that a workflow handles, from its source, so that misspelled ones are not sent."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable
from typing import Any

from orchestrator.domain.fleet.announced import unknown_signal
from orchestrator.errors import InvalidTask, UnknownHandler, did_you_mean
from orchestrator.sdk.tasks.signature import Signature

WORKFLOW_CLASS = "_workflow_class"
"""The attribute of a workflow function that holds its workflow class."""
SIGNAL_METHODS = "_signal_methods"
"""The attribute of a workflow function that holds the names of its class's signal methods."""
_TAKES_SIGNALS = frozenset({"signal", "signals"})
"""Methods of a context that receive signals."""
_INDIRECT_ACCESS = frozenset({"eval", "exec", "locals", "vars"})
"""Functions that can access the context without naming it."""


class WorkflowSignature(Signature):
    """A workflow's signature, and the updates and signals that its code handles."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Collection[str],
        versions: Callable[[], Iterable[Callable[..., Any]]],
    ) -> None:
        """`versions` returns all functions registered under this name; any of them may run the code."""
        super().__init__(name, function, what="Workflow", leading=1, options=options)
        self._function = function
        self._versions = versions

    def classes(self) -> list[type]:
        """Return the classes of all registered versions of the workflow."""
        functions = (self._function, *self._versions())
        return list(dict.fromkeys(vars(code)[WORKFLOW_CLASS] for code in functions if WORKFLOW_CLASS in vars(code)))

    def check_update(self, name: str) -> None:
        """Raise InvalidTask if no version of the code answers the update. If that is unknown, the run decides."""
        known = self._of_all_versions(update_names)
        if known is not None and name not in known:
            raise InvalidTask(
                f"Workflow {self.name!r} answers no update {name!r}.{did_you_mean(name, sorted(known))} "
                f"It answers: {', '.join(sorted(known)) or 'none'}."
            )

    def check_signal(self, name: str) -> None:
        """Raise UnknownHandler if no version of the code takes the signal. If that is unknown, it is sent."""
        known = self.signals()
        if known is not None and name not in known:
            raise UnknownHandler(unknown_signal(self.name, name, known))

    def signals(self) -> frozenset[str] | None:
        """Return the names of the signals that any version of the code takes; None if it may take any signal."""
        return self._of_all_versions(signal_names)

    def _of_all_versions(self, find: Callable[[Callable[..., Any]], frozenset[str] | None]) -> frozenset[str] | None:
        known: frozenset[str] = frozenset()
        for function in (self._function, *self._versions()):
            names = find(function)
            if names is None:
                return None
            known |= names
        return known


@functools.lru_cache(maxsize=1_000)
def signal_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the signals that a workflow takes: those of its class's methods.

    None for a function, and for a class that asks its context for signals, or passes it, or itself, to other code.
    """
    names: frozenset[str] | None = vars(function).get(SIGNAL_METHODS)
    return names if names is not None and _keeps_its_context(vars(function)[WORKFLOW_CLASS]) else None


def _keeps_its_context(kind: type) -> bool:
    try:
        classes = [cls for cls in kind.__mro__ if cls.__module__.partition(".")[0] not in sys.stdlib_module_names]
        nodes = [node for cls in classes for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))]
    except Exception:  # noqa: BLE001  # the source is missing or unreadable: a worker starts anyway
        return False
    context = next(iter(inspect.signature(kind).parameters))
    stored = [pair for node in nodes for pair in _assigned(node) if _is_name(pair[1], context)]
    context_names = {context, *(target.attr for target, _ in stored if isinstance(target, ast.Attribute))}
    allowed = {value for target, value in stored if isinstance(target, ast.Attribute)}
    allowed |= {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr not in _TAKES_SIGNALS}
    return not any(
        _is_name(node, context, "self", *_INDIRECT_ACCESS)
        or (isinstance(node, ast.Attribute) and node.attr in context_names and isinstance(node.ctx, ast.Load))
        for node in nodes
        if node not in allowed
    )


def _assigned(node: ast.AST) -> Iterable[tuple[ast.expr, ast.expr]]:
    """Yield the pairs of target and value in an assignment. `self.ctx, self.paid = ctx, 0` has two."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names


@functools.lru_cache(maxsize=1_000)
def update_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the update handlers that a function's code registers.

    None if the source is not available, the code passes its context to other code, or computes a name at run time.
    """
    code = _source(function)
    if code is None:
        return None
    reader = _Reader([*code.args.posonlyargs, *code.args.args][0].arg)
    for statement in code.body:
        reader.visit(statement)
    return frozenset(reader.names) if reader.is_certain else None


def _source(function: Callable[..., Any]) -> ast.AsyncFunctionDef | None:
    if hasattr(function, "__wrapped__"):
        return None
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return code if isinstance(code, ast.AsyncFunctionDef) and code.name == function.__name__ else None


class _Reader(ast.NodeVisitor):
    """Finds `@ctx.update`, with or without arguments, and any other use of the context that may register an update."""

    def __init__(self, context: str) -> None:
        self._context = context
        self.names: set[str] = set()
        self.is_certain = True

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Read `@ctx.update` and `@ctx.update(validate=…)`: the handlers have the names of their functions."""
        for decorator in [*node.decorator_list]:
            call = decorator if isinstance(decorator, ast.Call) and not decorator.args else None
            if self._is_update(decorator if call is None else call.func):
                self.names.add(node.name)
                node.decorator_list.remove(decorator)
                for keyword in () if call is None else call.keywords:
                    self.visit(keyword)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        """Read `ctx.update("name")`."""
        first = node.args[0] if node.args else None
        if self._is_update(node.func) and isinstance(first, ast.Constant) and isinstance(first.value, str):
            self.names.add(first.value)
            for keyword in node.keywords:
                self.visit(keyword)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Skip other attributes of the context."""
        if self._is_update(node):
            self.is_certain = False
        elif not self._is_context(node.value):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Detect that the context is passed on."""
        if self._is_context(node) or node.id in _INDIRECT_ACCESS:
            self.is_certain = False

    def _is_update(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "update" and self._is_context(node.value)

    def _is_context(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self._context
