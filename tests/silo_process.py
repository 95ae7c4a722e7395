"""A process that takes part in one run after the other, as standard input tells it to.

Each line is a JSON object: the server's address, the silo's folder, files of allowed code, where
there is TLS the authority's certificate and, if the silo is to hang in a round, its number. Each
answer is a line: `ready` at the start, `attached` and `working` as it goes, and in the end why the
run failed, or nothing.
"""

import json
import signal
import sys
import time
from pathlib import Path

from silograph.deploy.allowed_code import allow_code
from silograph.deploy.silo import Attendance, take_part_in_run
from silograph.federation.frame import decode
from silograph.federation.session.events import Event, What, log_event
from silograph.federation.session.message import Type, read_call, unpack
from silograph.federation.session.responder import Responder
from silograph.graph.silos.read import read_silo
from silograph.methods import METHODS


def main() -> None:
    say("ready")
    for line in sys.stdin:
        told = json.loads(line)
        folder, report = Path(told["folder"]), log_event
        if "hang" in told:
            hang(told["hang"])
            report = attached
        how = Attendance(
            told["address"],
            folder / "key.pem",
            folder.parent / "secret",
            ca=Path(told["ca"]) if "ca" in told else None,
            insecure="ca" not in told,
            state=folder / "state",
            allow=(*METHODS, "collect", "items", "users"),
            code=allow_code(told.get("code", ())),
        )
        say(take_part_in_run(read_silo(folder), how, report) or "")


def attached(event: Event) -> None:
    if event.what is What.ATTACHED:
        say("attached")


def hang(number: int) -> None:
    """Let the first op of a round not end before SIGUSR1."""
    answer, came = Responder.answer, list[int]()
    signal.signal(signal.SIGUSR1, lambda sent, _: came.append(sent))

    def hanging(self: Responder, data: bytes | bytearray) -> bytes:
        message = unpack(data)
        if message.type is Type.CALL:
            envelope, _ = decode(read_call(message.body).frame)
            if envelope.round == number:
                Responder.answer = answer  # type: ignore[method-assign] # once only
                say("working")
                while not came:  # which may have been sent already: `pause` would miss it
                    time.sleep(0.01)
        return answer(self, data)

    Responder.answer = hanging  # type: ignore[method-assign]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
