"""A real Jupyter kernel for tests: run cells, interrupt, kill."""

import contextlib
import time
from dataclasses import dataclass, field
from queue import Empty

from jupyter_client.manager import start_new_kernel


@dataclass
class Outcome:
    """What a cell left: its text outputs joined, its error if any, the live updates it made, and its seconds."""

    text: str = ""
    error: str = ""
    traceback: str = ""
    updates: int = 0
    seconds: float = 0.0
    messages: list = field(default_factory=list)


class Kernel:
    """A running kernel with a blocking client."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def start(self, code: str, watched: bool = False) -> str:
        return self.client.execute(code, allow_stdin=watched)

    def run(self, code: str, watched: bool = False, timeout: float = 60) -> Outcome:
        return self.finish(self.start(code, watched), timeout)

    def finish(self, message_id: str, timeout: float = 60) -> Outcome:
        outcome, begun = Outcome(), time.monotonic()
        while time.monotonic() - begun < timeout:
            with contextlib.suppress(Empty):
                message = self.client.get_iopub_msg(timeout=0.5)
                if message["parent_header"].get("msg_id") != message_id:
                    continue
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    outcome.seconds = time.monotonic() - begun
                    return outcome
                _take(outcome, message)
        raise TimeoutError(f"the cell did not end within {timeout} s; so far: {outcome}")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.stop_channels()
            self.manager.shutdown_kernel(now=True)


def _take(outcome: Outcome, message: dict) -> None:
    kind, content = message["msg_type"], message["content"]
    outcome.messages.append(kind)
    if kind == "stream":
        outcome.text += content["text"]
    elif kind in ("display_data", "execute_result"):
        outcome.text += content["data"].get("text/plain", "") + "\n"
    elif kind == "update_display_data":
        outcome.updates += 1
        outcome.text = content["data"].get("text/plain", "") + "\n"
    elif kind == "error":
        outcome.error = f"{content['ename']}: {content['evalue']}"
        outcome.traceback = "\n".join(content["traceback"])
