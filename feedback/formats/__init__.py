"""Outside formats, one file each: which one a file is of, what it says in our words, how ours are said in it."""

from __future__ import annotations

from feedback.formats.columns import ColumnMap as ColumnMap
from feedback.formats.previews import preview as preview
from feedback.formats.reading import FORMATS as FORMATS
from feedback.formats.reading import SHAPES as SHAPES
from feedback.formats.reading import decisions_before_feedback as decisions_before_feedback
from feedback.formats.reading import detect as detect
from feedback.formats.reading import named as named
from feedback.formats.reading import read as read
from feedback.formats.reading import readings as readings
from feedback.formats.records import uuid_of as uuid_of
