"""Pages for people: one self-contained HTML file each, in one style (`templates/page.css.j2`), with
nothing to fetch and nothing that runs.

They follow the reader's light or dark setting, and all text is escaped: names of prompts and of
machines come from outside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent / "templates"


def render_page(template: Path, **values: Any) -> str:
    """A template with these values, as the text of a page; it may include what pages share."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, SHARED]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)
