"""Files that this package writes for users, from templates (`*.j2`) that lie beside the code that fills them."""

import json
import shlex
from functools import cache, partial
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template


@cache
def template(package: str, name: str) -> Template:
    """A template of a package, for shell and YAML. Filters: sh and words quote for a shell, quoted as in JSON."""
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # bash uses {#
        comment_end_string="#>",
    )
    environment.filters["sh"] = shlex.quote
    environment.filters["words"] = lambda text: " ".join(shlex.quote(word) for word in shlex.split(text))
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))
