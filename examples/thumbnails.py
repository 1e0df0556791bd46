"""Thumbnails of every picture in a folder: one task per file, in parallel, with a summary at the end.

pip install pillow
orchestrator dev --app thumbnails:app
python thumbnails.py ~/Pictures             # in a second terminal in this folder
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from orchestrator import GiveUp, Orchestrator

app = Orchestrator()


# A broken picture may crash or block a decoder: decode each in its own process, for at most half a minute.
@app.task(isolation="process", timeout=30, retries=2)
def thumbnail(source: Path, target: Path, size: int = 128) -> tuple[int, int]:
    """Write a small copy of a picture; return its width and height."""
    try:
        with Image.open(source) as picture:
            picture.thumbnail((size, size))
            small = picture.convert("RGB")
    except UnidentifiedImageError as error:
        raise GiveUp(str(error)) from None  # a retry would not help
    unfinished = target.with_suffix(".part")  # no reader sees a partial file, although a task may run twice
    small.save(unfinished, "JPEG")
    unfinished.replace(target)
    return small.size


def main(folder: Path) -> None:
    """Make thumbnails of all pictures in a folder."""
    target = folder / "thumbnails"
    target.mkdir(exist_ok=True)
    pictures = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".gif"))
    calls = [(path.resolve(), (target / f"{path.stem}.jpg").resolve()) for path in pictures]
    run = app.start_many(thumbnail, calls, name="thumbnails")
    status = run.wait_ended(timeout=600)
    counters = run.progress().counters
    print(f"{status}: {counters.success} thumbnails, {counters.failed} failed (orchestrator runs show {run.id})")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
