"""What commands and pages say to a person or a program."""

import json
import re
from io import StringIO
from typing import Any

from django.core.management import call_command


def command(*arguments: str, **options: Any) -> Any:
    """The JSON that a management command prints."""
    out = StringIO()
    call_command(*arguments, "--json", stdout=out, **({"stderr": StringIO()} | options))
    return json.loads(out.getvalue())


def words(html: str) -> str:
    """The text of a page, without tags; its no-break spaces stay."""
    return re.sub(r"[ \n]+", " ", re.sub(r"<[^>]*>", " ", html)).strip()
