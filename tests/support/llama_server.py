"""llama-cpp-python's own server in a thread of the tests, with the bundled base as its model `m-1`."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.server import free_port
from tests.support.serving import gguf_files

START_S = 60.0


@contextmanager
def llama_server() -> Iterator[str]:
    """Its address, while it serves."""
    import uvicorn
    from llama_cpp.server.app import create_app
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    model = ModelSettings(model=str(gguf_files().base), model_alias="m-1", n_ctx=512, verbose=False)
    app = create_app(server_settings=ServerSettings(), model_settings=[model])
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(10)
