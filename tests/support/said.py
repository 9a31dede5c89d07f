"""What commands and pages say to a person or a program."""

import json
import re
from io import StringIO
from typing import Any

from django.core.management import call_command


def printed(*arguments: str, **options: Any) -> str:
    """What a management command prints."""
    out = StringIO()
    call_command(*arguments, stdout=out, **({"stderr": StringIO()} | options))
    return out.getvalue()


def command(*arguments: str, **options: Any) -> Any:
    """The JSON that a management command prints."""
    return json.loads(printed(*arguments, "--json", **options))


def words(html: str) -> str:
    """The text of a page, without tags; its no-break spaces stay."""
    return re.sub(r"[ \n]+", " ", re.sub(r"<[^>]*>", " ", html)).strip()
