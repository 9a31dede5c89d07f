"""Tables of rl: snapshots, runs with their metrics, evaluations, policies and their history."""

from rl.models.agents import AgentBase as AgentBase
from rl.models.agents import AgentDefinition as AgentDefinition
from rl.models.benchmarks import BenchmarkResult as BenchmarkResult
from rl.models.experiments import Arm as Arm
from rl.models.experiments import Experiment as Experiment
from rl.models.experiments import ExperimentEvent as ExperimentEvent
from rl.models.labels import LabelRun as LabelRun
from rl.models.learning import GateSettings as GateSettings
from rl.models.learning import GoldenCase as GoldenCase
from rl.models.learning import LearnerSettings as LearnerSettings
from rl.models.learning import Learnt as Learnt
from rl.models.policies import Artifact as Artifact
from rl.models.policies import Evaluation as Evaluation
from rl.models.policies import Policy as Policy
from rl.models.policies import PolicyEvent as PolicyEvent
from rl.models.reward_models import RewardModelEvent as RewardModelEvent
from rl.models.reward_models import RewardModelVersion as RewardModelVersion
from rl.models.rewards import RewardRecord as RewardRecord
from rl.models.rewards import RewardSettings as RewardSettings
from rl.models.runs import RunMetric as RunMetric
from rl.models.runs import Snapshot as Snapshot
from rl.models.runs import TrainingRun as TrainingRun
from rl.models.serving import ServingSettings as ServingSettings
from rl.models.splits import PromptSplit as PromptSplit
from rl.models.upstreams import Upstream as Upstream
