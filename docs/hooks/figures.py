"""mkdocs hook: resolves the directives of ``measured.py`` in every page. One that can't be resolved fails the build."""

from __future__ import annotations

from typing import Any

import claims  # noqa: F401  measured.py needs it when pages are rendered, and hooks can import each other only here
import measured
from mkdocs.exceptions import PluginError


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with its figures."""
    try:
        return measured.render(markdown, page.file.src_uri)
    except measured.MeasuredError as error:
        raise PluginError(str(error)) from error
