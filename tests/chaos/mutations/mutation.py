"""A mutation, and the commands that find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Finder(NamedTuple):
    """A command that must fail with the mutation."""

    arguments: tuple[str, ...]
    """Arguments of Python, run in the repository."""
    says: str
    """Regular expression for the command's output with the mutation: failing in another way does not count."""
    tries: int = 1
    """Maximum number of runs: the timing of real faults varies."""

    @property
    def command(self) -> str:
        """The command as typed by a person who has made the change by hand."""
        module, *rest = self.arguments[1:]
        script = {"tests.chaos.real": "scripts/chaos", "pytest": "scripts/test"}.get(module, f"python -m {module}")
        return " ".join([script, *(word for word in rest if word not in QUIET)])


QUIET = ("-q", "--no-header", "-p", "no:cacheprovider", "-x")


def seeds(numbers: str, says: str) -> Finder:
    """Return a finder that runs seeds of the simulator, such as `85`."""
    return Finder(("-m", "tests.chaos.simulator", *numbers.split()), says)


def chaos(options: str, says: str, *, tries: int = 2) -> Finder:
    """Return a finder that runs the chaos driver."""
    return Finder(("-m", "tests.chaos.real", *options.split()), says, tries)


def tests(names: str, says: str) -> Finder:
    """Return a finder that runs tests, given as `file` or `file::test`."""
    return Finder(("-m", "pytest", *QUIET, *names.split()), says)


class NotThere(Exception):
    """A mutation's old text is not in the product (any more)."""


@dataclass(frozen=True)
class Mutation:
    """A change that breaks a promise."""

    name: str
    what: str
    """The effect on the product, for display."""
    file: str
    old: str
    """Text that occurs once in the file."""
    new: str
    finders: tuple[Finder, ...]
    """Commands that each find the mutation alone."""
    missed: str = ""
    """Tests that do not find the mutation, with the reason."""

    def mutated(self, repository: Path) -> str:
        """Return the mutated text of the file."""
        path = repository / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (found := text.count(self.old)) != 1:
            raise NotThere(
                f"Mutation {self.name}: expected its old text once in {self.file}, found it {found} times. Find out "
                f"what stands there now, and give the mutation the text that breaks the same promise:\n{self.old}"
            )
        return text.replace(self.old, self.new)
