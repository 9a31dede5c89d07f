"""Exporter `adapter-zip`: an adapter as one zip file. Every process imports this; the writer is named by its path."""

from rl.export.artifact import Exporter

EXPORTER = Exporter(
    "adapter-zip",
    writer="ratchet_mail.zip_writer:export_adapter_zip",
    title="the adapter's files in one zip, to send by mail",
    options=("model_name",),
)
