"""The methods, by the name users give."""

from silograph.methods.base import Method
from silograph.methods.centralized import CENTRALIZED
from silograph.methods.fedavg import FEDAVG, FEDOPT
from silograph.methods.label_guided import LABEL_GUIDED
from silograph.methods.local_only import LOCAL

METHODS: dict[str, Method] = {m.name: m for m in (LOCAL, FEDAVG, FEDOPT, LABEL_GUIDED, CENTRALIZED)}
