"""Outside formats, one file each: which one a file is of, what it says in our words, how ours are said in it."""

from __future__ import annotations

from feedback.transfer.formats.columns import ColumnMap as ColumnMap
from feedback.transfer.formats.order import FORMATS as FORMATS
from feedback.transfer.formats.order import SHAPES as SHAPES
from feedback.transfer.formats.readers import decisions_before_feedback as decisions_before_feedback
from feedback.transfer.formats.readers import detect as detect
from feedback.transfer.formats.readers import format_by_name as format_by_name
from feedback.transfer.formats.readers import preview as preview
from feedback.transfer.formats.readers import read as read
from feedback.transfer.formats.readers import readings as readings
from feedback.transfer.formats.records import uuid_of as uuid_of
