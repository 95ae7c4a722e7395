"""Files of the models that clients have of their own, as a simulation keeps them.

At a silo of a real federation the silo keeps its own (`silograph.deploy.silo_result`).
"""

from urllib.parse import quote

LONGEST = 100  # characters of a client's name in the name of a file


def file_of(number: int, client: str) -> str:
    """Return the name of the file of a client's own model; names may have any letters.

    >>> file_of(3, "St. Mary/north")
    '3-St.%20Mary%2Fnorth.safetensors'
    """
    return f"{number}-{quote(client, safe='')[:LONGEST]}.safetensors"
