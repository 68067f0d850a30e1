"""Models in shards over several processes (tensor parallelism): `generate` calls that all processes
make, and engines that process 0 drives. Implements `seams.Processes` and `seams.Leader`. The core
calls this package through `model.sharding`. It imports no other optional package."""

from .leader import lead as lead
from .leader import serve as serve
from .processes import processes_of as processes_of
from .processes import reserving as reserving
from .signals import deferring_signals as deferring_signals
