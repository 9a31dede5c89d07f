"""Client of Ratchet: record what an app decides, rate it, report what came of it. Standard library only."""

from ratchet_client.checkpoints import CheckpointLoader, CheckpointRefused
from ratchet_client.client import Client, Decision, Receipt
from ratchet_client.collector import CollectorStatus, TraceCollector
from ratchet_client.decorators import records_decision, records_tool
from ratchet_client.hooks import Hook, hook_into_agent
from ratchet_client.json_values import redact_keys
from ratchet_client.traces import Span, Trace
from ratchet_client.transport import RatchetError, RequestRefused, ServerUnavailable
from ratchet_client.version import __version__

__all__ = [
    "CheckpointLoader",
    "CheckpointRefused",
    "Client",
    "CollectorStatus",
    "Decision",
    "Hook",
    "RatchetError",
    "Receipt",
    "RequestRefused",
    "ServerUnavailable",
    "Span",
    "Trace",
    "TraceCollector",
    "__version__",
    "hook_into_agent",
    "records_decision",
    "records_tool",
    "redact_keys",
]
