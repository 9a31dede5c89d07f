"""Tables of feedback: append-only facts, the imports they came by, and the tables of their upkeep."""

from backend.bodies import SLUG_PATTERN as SLUG_PATTERN
from feedback.models.facts import SHADOW as SHADOW
from feedback.models.facts import AgentSettings as AgentSettings
from feedback.models.facts import ApiKey as ApiKey
from feedback.models.facts import Comparison as Comparison
from feedback.models.facts import Decision as Decision
from feedback.models.facts import Lease as Lease
from feedback.models.facts import Outcome as Outcome
from feedback.models.facts import Preference as Preference
from feedback.models.facts import RaterKind as RaterKind
from feedback.models.facts import Rating as Rating
from feedback.models.facts import RatingRequest as RatingRequest
from feedback.models.facts import Thumb as Thumb
from feedback.models.facts import Trace as Trace
from feedback.models.facts import agent_slug as agent_slug
from feedback.models.facts import prompt_hash as prompt_hash
from feedback.models.facts import shadow_id as shadow_id
from feedback.models.imports import ImportBatch as ImportBatch
from feedback.models.imports import ProblemRow as ProblemRow
from feedback.models.imports import Tombstone as Tombstone
from feedback.models.imports import Withdrawal as Withdrawal
from feedback.models.masks import MaskError as MaskError
from feedback.models.masks import masks_read as masks_read
from feedback.models.spans import CallSpan as CallSpan
