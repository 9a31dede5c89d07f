"""The admin of rl: the registry an operator lives on, what its policies came from, and what is set per agent."""

from rl.admin import experiments as experiments
from rl.admin import golden as golden
from rl.admin import policies as policies
from rl.admin import runs as runs
from rl.admin import settings as settings
from rl.admin import upstreams as upstreams
from rl.admin import workers as workers
