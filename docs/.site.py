"""Has the site load nothing from elsewhere."""

from typing import Any


def on_post_page(output: str, **_: Any) -> str:
    """Put our script, which lets people search in pages that they read from a folder, in the place of a foreign one."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "assets/offline-search.js")
