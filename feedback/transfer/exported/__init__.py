"""Views that an export is made from: all feedback, read piece by piece, never all at once."""

from feedback.transfer.exported.selecting import MORE as MORE
from feedback.transfer.exported.selecting import RAW_HIGH as RAW_HIGH
from feedback.transfer.exported.selecting import RAW_LOW as RAW_LOW
from feedback.transfer.exported.selecting import Selection as Selection
from feedback.transfer.exported.selecting import one_moment as one_moment
from feedback.transfer.exported.views import records as records
