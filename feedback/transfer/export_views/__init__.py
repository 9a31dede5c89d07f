"""Views that an export is made from: all feedback, read piece by piece, never all at once."""

from feedback.transfer.export_views.selection import BEYOND_LIMIT as BEYOND_LIMIT
from feedback.transfer.export_views.selection import RAW_HIGH as RAW_HIGH
from feedback.transfer.export_views.selection import RAW_LOW as RAW_LOW
from feedback.transfer.export_views.selection import Selection as Selection
from feedback.transfer.export_views.selection import one_moment as one_moment
from feedback.transfer.export_views.views import records as records
