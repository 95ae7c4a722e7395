"""A server and two silos train over the network, as processes on this machine.

Shows: a folder of data for each silo; `silograph server` and `silograph silo`; the server's
result. Between machines leave out `--insecure` and use certificates and keys, as the tutorial
on your own tables does (docs/tutorials/own_tables.md).
"""

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import silograph as sg

if __name__ == "__main__":
    graph = sg.load("digits")
    print(graph)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "silograph"]
    with tempfile.TemporaryDirectory() as folder:
        silos, run = f"{folder}/silos", f"{folder}/run"
        cut = ["digits", "--clients", "2", "--partition", "metis", "--out", silos]
        subprocess.run([*command, "export-silos", *cut], check=True)
        clients = [
            subprocess.Popen(
                [*command, "silo", "--server", address, "--insecure", "--data", str(data)],
                stderr=subprocess.DEVNULL,
            )
            for data in sorted(Path(silos).glob("client_*"))
        ]
        settings = ["--clients", "2", "--rounds", "5", "--hidden", "16", "--out", run, "--quiet"]
        listen = ["--listen", address, "--insecure"]
        subprocess.run([*command, "server", *listen, *settings], check=True)
        assert all(client.wait(60) == 0 for client in clients)
        result = json.loads(Path(run, "result.json").read_text())
    print("test accuracy:", result["test"]["server"]["accuracy"])
