"""Models in shards over several processes (tensor parallelism): calls that all processes make, and
engines that process 0 drives. Implements `seams.Processes` and `seams.Leader`. Called through
`model.sharding`; imports no other optional package."""

from .leader import lead as lead
from .leader import serve as serve
from .processes import processes_of as processes_of
from .processes import reserving as reserving
from .signals import deferring_signals as deferring_signals
