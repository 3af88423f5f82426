"""A serving process among several: what it asks the others by way of the supervisor."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from edgesplit.errors import Busy
from edgesplit_offload.processes.ipc import Answers, Ask, IpcConnection
from edgesplit_offload.serving_process import SupervisedPeers


@pytest.mark.parametrize("missing", [0, 1])
def test_a_model_was_reported_unloaded_while_another_process_still_had_it(missing: int) -> None:
    """A change is done when every process that lives has done it; Busy if one has not."""
    ours, theirs = socket.socketpair()
    with closing(IpcConnection(ours)) as ipc, closing(IpcConnection(theirs)) as supervisor:
        peers, changed = SupervisedPeers(ipc), list[str]()
        peers.listen({"unload": changed.append})

        def answer() -> None:
            question = next(supervisor.messages())
            assert isinstance(question, Ask)
            assert (question.question, question.argument) == ("unload", "model")
            peers.on_message(Answers(question.number, [None], missing))

        answering = threading.Thread(target=answer)
        answering.start()
        if missing:
            with pytest.raises(Busy, match="1 serving processes have not done it"):
                peers.change("unload", "model")
        else:
            peers.change("unload", "model")
        answering.join()
        assert changed == ["model"]
