"""Reads a project that uses another queue, and gives a verdict on each use. Nothing is imported or run.

A use is a name imported from the library, a call of such a name or of a task, an option of such a call that behaves
differently, or a setting.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from orchestrator.compat.celery.conf import WITHOUT_EFFECT
from orchestrator.compat.coverage import LIBRARIES, MOVES, NO_EFFECT, PER_PROJECT, Library, Rule, Verdict, rule_of_name

_MAX_FILE_SIZE = 2_000_000
"""Bytes of the largest file that is read; larger ones are not written by people."""
_SKIPPED = frozenset(["__pycache__", "site-packages", "dist-packages", "node_modules"])
_ENVIRONMENT_FILES = ("pyvenv.cfg", "conda-meta")
_GET_NAMES = frozenset(["timeout", "propagate", "interval", "follow_parents"])
"""Arguments of `AsyncResult.get`; methods with other arguments, such as `dict.get`, do not wait for a result."""
_CONTINUED_LINE_ENDS = ("(", "[", "{", ",", "\\")


class Use(NamedTuple):
    """One use of a library, with its verdict."""

    file: str
    line: int
    library: str
    what: str
    verdict: Verdict
    note: str


@dataclass
class Findings:
    """The result of reading a project."""

    files: int = 0
    """Number of Python files that were read."""
    uses: list[Use] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    """Reasons by file that could not be read."""
    diffs: list[str] = field(default_factory=list)
    """Unified diffs of the changed files."""

    def count(self, verdict: Verdict) -> int:
        """Return the number of uses with this verdict."""
        return sum(use.verdict is verdict for use in self.uses)

    @property
    def score(self) -> int | None:
        """Percentage of uses that move, rounded down. An unread file counts as a use that stays. None without uses."""
        moving = len(self.uses) - self.count(Verdict.STAYS)
        return 100 * moving // (len(self.uses) + len(self.unread)) if self.uses else None


def read_project(path: Path) -> Findings:
    """Read a Python file, or all Python files of a folder."""
    findings, parsed = Findings(), []
    for file in _python_files(path):
        name = file.name if file == path else file.relative_to(path).as_posix()
        try:
            text, tree = _parse(file)
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
            findings.unread[name] = _reason(error)
            continue
        findings.files += 1
        parsed.append((name, text, tree))
    libraries = {name: library for *_, tree in parsed for name, library in _imported_libraries(tree).items()}
    for name, text, tree in parsed:
        try:
            reader = _Reader(name, tree, list(libraries.values()))
        except RecursionError as error:
            findings.unread[name] = _reason(error)
            continue
        findings.uses += reader.uses
        changed = difflib.unified_diff(_lines(text), _lines(_changed(text, reader)), f"a/{name}", f"b/{name}")
        findings.diffs.append("".join(changed))
    if (first := next((use for use in findings.uses if use.what == "Celery(…)"), None)) is not None:
        after = findings.uses.index(first) + 1
        findings.uses[after:after] = [first._replace(what=what, **rule._asdict()) for what, rule in PER_PROJECT.items()]
    return findings


def _python_files(path: Path) -> Iterator[Path]:
    """Yield a project's Python files once each, without virtual environments, packages and symbolic links."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        path_ = Path(folder)
        folders[:] = sorted(name for name in folders if not _is_skipped(path_ / name))
        yield from (path_ / name for name in sorted(names) if name.endswith(".py") and not (path_ / name).is_symlink())


def _is_skipped(folder: Path) -> bool:
    return (
        folder.name in _SKIPPED
        or folder.name.startswith(".")
        or any((folder / name).exists() for name in _ENVIRONMENT_FILES)
    )


def _parse(file: Path) -> tuple[str, ast.Module]:
    if (size := file.stat().st_size) > _MAX_FILE_SIZE:
        raise ValueError(f"{size:,} bytes, and up to {_MAX_FILE_SIZE:,} are read")
    data = file.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the project's strings are not reported
        return data.decode(encoding), ast.parse(data)


def _reason(error: BaseException) -> str:
    where = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
    return f"{where}{getattr(error, 'msg', None) or str(error) or type(error).__name__}"


def _imported_libraries(tree: ast.Module) -> dict[str, Library]:
    top_modules = {module.partition(".")[0] for node in ast.walk(tree) for module in _modules_of(node)}
    return {LIBRARIES[top].name: LIBRARIES[top] for top in sorted(top_modules & LIBRARIES.keys())}


def _modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


class _Reader(ast.NodeVisitor):
    """Collects the uses in one file."""

    def __init__(self, file: str, tree: ast.Module, used: list[Library]) -> None:
        self._file = file
        self.uses: list[Use] = []
        self.imports: list[ast.Import | ast.ImportFrom] = []
        """Import statements of a library's modules."""
        self.settings: dict[int, str] = {}
        """Notes for settings that behave differently, by line number."""
        self._in_task = False
        self._library_names: dict[str, str] = {}
        """Top-level modules of libraries, by the names that this file gives them."""
        self._project_libraries = used
        self._file_libraries = _imported_libraries(tree)
        self._configured = [library for library in used if library.settings]
        self._is_configuration = Path(file).stem in ("celeryconfig", "celery_config")
        self.visit(tree)
        self.uses.sort(key=lambda use: use.line)

    def _add(self, node: ast.AST, library: Library, what: str, rule: Rule) -> None:
        self.uses.append(Use(self._file, getattr(node, "lineno", 1), library.name, what, *rule))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if (library := LIBRARIES.get(alias.name.partition(".")[0])) is not None:
                rule = MOVES if alias.name in library.modules else library.otherwise
                self._add(node, library, f"import {alias.name}", rule)
                if alias.asname is None or "." not in alias.name:
                    self._library_names[alias.asname or alias.name.partition(".")[0]] = alias.name.partition(".")[0]
                self.imports.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        library = None if node.level else LIBRARIES.get(module.partition(".")[0])
        if library is None:
            return
        for alias in node.names:
            rule = rule_of_name(module, alias.name) if alias.name != "*" else Rule(Verdict.CHANGES, "name what you use")
            self._add(alias, library, f"{module}.{alias.name}", rule)
        if module in library.modules:
            self.imports.append(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for library in self._project_libraries:
            if name in library.calls and (library.name in self._file_libraries or name in library.anywhere):
                self._add(node, library, f"{name}(…)", MOVES)
                for keyword in node.keywords:
                    if (rule := library.calls[name].get(keyword.arg or "")) is not None:
                        self._add(keyword, library, f"{name}({keyword.arg}=…)", rule)
        for library in self._file_libraries.values():
            for keyword in node.keywords:
                if (rule := library.attributes.get(what := f"{name}({keyword.arg}=…)")) is not None:
                    self._add(keyword, library, what, rule)
            waits = self._in_task and not node.args and _GET_NAMES.issuperset(keyword.arg for keyword in node.keywords)
            if waits and (rule := library.attributes.get(what := f"{name}() in a task")) is not None:
                self._add(node, library, what, rule)
        if name == "update" and isinstance(node.func, ast.Attribute) and _is_conf(node.func.value):
            for library in self._configured:
                for keyword in node.keywords:
                    self._setting(keyword, library, keyword.arg or "")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for library in self._project_libraries:
            if library.name in self._file_libraries and (rule := library.attributes.get(node.attr)) is not None:
                self._add(node, library, f".{node.attr}", rule)
        module = self._library_names.get(getattr(node.value, "id", ""))
        if module is not None:
            self._add(node, LIBRARIES[module], f"{module}.{node.attr}", rule_of_name(module, node.attr))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Count decorators without arguments as uses, and methods that behave differently."""
        outer = self._in_task
        for library in self._file_libraries.values():
            if (rule := library.attributes.get(what := f"def {node.name}(…)")) is not None:
                self._add(node, library, what, rule)
        for decorator in node.decorator_list:
            function = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            for library in self._project_libraries:
                if name in library.calls and library.name in self._file_libraries:
                    self._in_task = True
                    if function is decorator:
                        self._add(decorator, library, f"@{name}", MOVES)
        self.generic_visit(node)
        self._in_task = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for library in self._configured:
                if isinstance(target, ast.Attribute) and _is_conf(target.value):
                    self._setting(node, library, target.attr)
                elif isinstance(target, ast.Name) and target.id.startswith(library.prefix):
                    self._setting(node, library, target.id.removeprefix(library.prefix).lower())
                elif isinstance(target, ast.Name) and self._is_configuration:
                    self._setting(node, library, target.id)
        self.generic_visit(node)

    def _setting(self, node: ast.Assign | ast.keyword, library: Library, name: str) -> None:
        rule = library.settings.get(name, NO_EFFECT if name in WITHOUT_EFFECT else MOVES)
        self._add(node, library, f"setting {name}", rule)
        if rule.note and node.end_lineno == node.lineno:
            self.settings[node.lineno] = rule.note


def _is_conf(node: ast.expr) -> bool:
    """Return whether an expression is an application's settings: `app.conf`, or just `conf`."""
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "conf"


# -- changing imports and settings


def _changed(text: str, reader: _Reader) -> str:
    """Return the text of a file with changed imports, and notes at settings."""
    lines = _lines(text)
    for node in reader.imports:
        lines[node.lineno - 1] = _changed_import(lines[node.lineno - 1], node)
    for number, note in reader.settings.items():
        code, end = _split_end(lines[number - 1])
        if not code.rstrip().endswith(_CONTINUED_LINE_ENDS) and "#" not in code:
            lines[number - 1] = f"{code}  # {note}{end}"
    return "".join(lines)


def _lines(text: str) -> list[str]:
    """Return the lines of a file, split as Python does."""
    return list(io.StringIO(text, newline=""))


def _changed_import(line: str, node: ast.Import | ast.ImportFrom) -> str:
    indent, code = line[: node.col_offset], line[node.col_offset :]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return indent + code.replace(f"from {module} ", f"from {_counterpart(module)} ", 1)
    if len(node.names) > 1 or ";" in code:
        return line  # needs to be split by hand
    alias, (_, end) = node.names[0], _split_end(code)
    counterpart = _counterpart(alias.name)
    if alias.asname is not None or "." not in alias.name:
        return f"{indent}import {counterpart} as {alias.asname or alias.name}{end}"
    top = alias.name.partition(".")[0]
    return f"{indent}import {counterpart}{end}{indent}import {_counterpart(top)} as {top}{end}"


def _counterpart(module: str) -> str:
    return LIBRARIES[module.partition(".")[0]].modules.get(module, module)


def _split_end(line: str) -> tuple[str, str]:
    code = line.rstrip("\r\n")
    return code, line[len(code) :] or "\n"
