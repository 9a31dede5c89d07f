"""The tables as eighteen migrations made them, for a new database; one that has some of the eighteen applied goes on with those.

Written from the models, then the steps of the eighteen that leave something in an empty database: rights, and the daily schedule. Left
out: 0013, 0015 and 0016, which read or change rows that are there. tests/test_upgrade.py holds both ways to the same schema, rights and
schedules.
"""

from importlib import import_module

import django.core.validators
import django.db.models.deletion
import django.utils.timezone
import rl.models.experiments
import rl.models.learning
from django.db import migrations, models

roles = import_module('rl.migrations.0002_roles')
gates = import_module('rl.migrations.0003_gates')
experiments = import_module('rl.migrations.0007_experiments')
rewards = import_module('rl.migrations.0008_rewards')
agent_definitions = import_module('rl.migrations.0009_agent_definitions')
serving = import_module('rl.migrations.0010_serving')
label_runs = import_module('rl.migrations.0012_label_runs')


class Migration(migrations.Migration):

    replaces = [
        ("rl", "0001_initial"),
        ("rl", "0002_roles"),
        ("rl", "0003_gates"),
        ("rl", "0004_snapshot_kinds"),
        ("rl", "0005_follow_up"),
        ("rl", "0006_hash_length"),
        ("rl", "0007_experiments"),
        ("rl", "0008_rewards"),
        ("rl", "0009_agent_definitions"),
        ("rl", "0010_serving"),
        ("rl", "0011_watching"),
        ("rl", "0012_label_runs"),
        ("rl", "0013_prompt_split"),
        ("rl", "0014_reward_models"),
        ("rl", "0015_learnt_use"),
        ("rl", "0016_gate_intervals"),
        ("rl", "0017_linear_policies"),
        ("rl", "0018_benchmarks"),
    ]

    initial = True

    dependencies = [
        ("feedback", "0001_squashed_0012_upkeep"),
        ('django_q', '0018_task_success_index'),
    ]

    operations = [
        migrations.CreateModel(
            name='AgentDefinition',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('slug', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$')])),
                ('title', models.CharField(max_length=100)),
                ('description', models.CharField(blank=True, max_length=300)),
                ('system_prompt', models.TextField(blank=True)),
                ('template', models.TextField(default='{question}', help_text='The prompt, with {name} for each value of the state: Ticket: {ticket}')),
                ('schema', models.JSONField(blank=True, help_text='JSON schema of the answer; empty: free text', null=True)),
                ('suggested_tags', models.JSONField(blank=True, default=list, help_text='["too long", "wrong"]')),
                ('max_new_tokens', models.PositiveIntegerField(default=128, help_text='Longest answer, in tokens')),
            ],
            options={
                'verbose_name': 'agent without code',
                'verbose_name_plural': 'agents without code',
                'ordering': ['slug'],
            },
        ),
        migrations.CreateModel(
            name='GateSettings',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$')])),
                ('min_evidence', models.PositiveIntegerField(default=30, help_text='Held-out prompts')),
                ('alpha', models.FloatField(default=0.05, help_text='Chance of taking luck for a gain, over all attempts on a holdout')),
                ('margin', models.FloatField(default=0.0, help_text='Lower bound of the gain in accuracy, 0 to 1')),
                ('max_reward_loss', models.FloatField(default=0.2, help_text='Fall of the mean reward that must be ruled out')),
                ('max_invalid_gain', models.FloatField(default=0.1, help_text='Fall of the share of valid answers that must be ruled out')),
                ('max_kl', models.FloatField(default=2.0, help_text='Nats per token to the base model')),
                ('max_slice_loss', models.FloatField(default=0.1)),
                ('min_slice', models.PositiveIntegerField(default=10)),
                ('max_length_ratio', models.FloatField(default=1.5)),
                ('max_rater_share', models.FloatField(default=0.2)),
                ('max_off_policy_loss', models.FloatField(default=0.05)),
                ('benchmarks', models.CharField(blank=True, default='', help_text='Benchmark tasks that must have been run (manage.py benchmark_model), with commas between; name=0.02 gives one its own bound', max_length=1000)),
                ('max_benchmark_loss', models.FloatField(default=0.05, help_text='Fall of a listed benchmark below the base that must be ruled out')),
            ],
            options={
                'verbose_name_plural': 'gate settings',
                'ordering': ['agent'],
            },
        ),
        migrations.CreateModel(
            name='Experiment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'A name is a slug of 1 to 64 lower-case letters, digits, - and _, such as shorter-answers.')])),
                ('agent', models.CharField(max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'A name is a slug of 1 to 64 lower-case letters, digits, - and _, such as shorter-answers.')])),
                ('hypothesis', models.TextField(blank=True, help_text='What is expected, and why')),
                ('status', models.CharField(choices=[('draft', 'Draft'), ('running', 'Running'), ('stopped', 'Stopped')], default='draft', max_length=8)),
                ('salt', models.CharField(default=rl.models.experiments.salt_new, editable=False, max_length=64)),
                ('ramp', models.PositiveSmallIntegerField(choices=[(1, '1 %'), (5, '5 %'), (10, '10 %'), (25, '25 %'), (50, '50 %'), (100, '100 %')], default=1, help_text='Percent of units that take part')),
                ('allocation', models.CharField(choices=[('fixed', 'fixed weights'), ('thompson', 'bandit: more to what seems better (Thompson)')], default='fixed', max_length=8)),
                ('epoch', models.PositiveIntegerField(default=0, editable=False, help_text='Times a bandit was reweighted')),
                ('floor', models.FloatField(default=0.05, help_text='Least share a bandit leaves an arm, above 0')),
                ('group', models.CharField(blank=True, help_text='Exclusion group: its experiments share no unit', max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'A name is a slug of 1 to 64 lower-case letters, digits, - and _, such as shorter-answers.')])),
                ('group_reserve', models.PositiveSmallIntegerField(choices=[(1, '1 %'), (5, '5 %'), (10, '10 %'), (25, '25 %'), (50, '50 %'), (100, '100 %')], default=50, help_text="Most it may ever take of its group's units")),
                ('group_start', models.FloatField(default=0.0, editable=False, help_text='Percent at which its part begins')),
                ('metric', models.CharField(default='thumbs_up', max_length=80)),
                ('goal', models.CharField(choices=[('higher', 'higher is better'), ('lower', 'lower is better')], default='higher', max_length=8)),
                ('alpha', models.FloatField(default=0.05, help_text='Chance of acting on luck alone, however often one looks')),
                ('tuning', models.PositiveIntegerField(default=1000, help_text='Units at which the interval is to be tightest')),
                ('min_units', models.PositiveIntegerField(default=50, help_text='Units per arm before anything is acted on')),
                ('guardrails', models.JSONField(blank=True, default=rl.models.experiments.guardrails_default)),
                ('slices', models.JSONField(blank=True, default=list, help_text='tag, source, or metadata.<key>')),
                ('on_win', models.CharField(choices=[('propose', 'propose the promotion; a person decides'), ('promote', 'promote it at once, where its gate opens')], default='propose', max_length=8)),
                ('reason', models.TextField(blank=True, help_text='Why it was stopped')),
                ('created_by', models.CharField(blank=True, max_length=200)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('started_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('ended_at', models.DateTimeField(blank=True, editable=False, null=True)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['status', 'agent'], name='rl_experime_status_7bf2cc_idx')],
                'constraints': [models.CheckConstraint(condition=models.Q(('status__in', ['draft', 'running', 'stopped'])), name='experiment_status_known'), models.CheckConstraint(condition=models.Q(('ramp__in', (1, 5, 10, 25, 50, 100))), name='experiment_ramp_known'), models.CheckConstraint(condition=models.Q(('alpha__gt', 0.0), ('alpha__lt', 0.5)), name='experiment_alpha_in_0_half'), models.CheckConstraint(condition=models.Q(('floor__gt', 0.0), ('floor__lte', 0.5)), name='experiment_floor_in_0_half'), models.CheckConstraint(condition=models.Q(('min_units__gte', 2), ('tuning__gte', 1)), name='experiment_counts_positive'), models.UniqueConstraint(condition=models.Q(('group', ''), ('status', 'running')), fields=('agent',), name='experiment_one_alone_per_agent'), models.UniqueConstraint(condition=models.Q(('status', 'running'), models.Q(('group', ''), _negated=True)), fields=('group', 'group_start'), name='experiment_one_per_place_in_group'), models.CheckConstraint(condition=models.Q(('status', 'draft'), ('started_at__isnull', False), _connector='OR'), name='experiment_begun_has_start'), models.CheckConstraint(condition=models.Q(models.Q(('status', 'stopped'), _negated=True), ('ended_at__isnull', False), _connector='OR'), name='experiment_stopped_has_end')],
            },
        ),
        migrations.CreateModel(
            name='ExperimentEvent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('created', 'Created'), ('started', 'Started'), ('ramped', 'Ramped'), ('reweighted', 'Reweighted'), ('mismatch', 'sample ratio mismatch'), ('harm', 'stopped for harm'), ('proposed', 'promotion proposed'), ('promoted', 'Promoted'), ('held', 'promotion held back by the gate'), ('stopped', 'Stopped')], max_length=12)),
                ('actor', models.CharField(help_text="A user's name, a key, or the clock", max_length=200)),
                ('reason', models.TextField(blank=True)),
                ('figures', models.JSONField(blank=True, default=dict)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('experiment', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='events', to='rl.experiment')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='GoldenCase',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$')])),
                ('name', models.CharField(max_length=100)),
                ('messages', models.JSONField(help_text='The prompt: [{"role": "user", "content": "..."}]')),
                ('state', models.JSONField(blank=True, help_text='What the app knows, where the agent needs it', null=True)),
                ('accepted', models.JSONField(blank=True, default=list, help_text='Responses that are right; empty: any valid one')),
                ('forbidden', models.JSONField(blank=True, default=list, help_text='Responses that are never right')),
                ('active', models.BooleanField(default=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'ordering': ['agent', 'name'],
                'constraints': [models.UniqueConstraint(fields=('agent', 'name'), name='golden_case_once_per_name')],
            },
        ),
        migrations.CreateModel(
            name='LabelRun',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64)),
                ('base_model', models.CharField(help_text='Whose embeddings it reads', max_length=500)),
                ('path', models.CharField(help_text='Folder of the model, relative to RATCHET_HOME', max_length=500)),
                ('features', models.JSONField(default=list, help_text='What suggestions are made from')),
                ('left_out', models.JSONField(default=dict, help_text='Features that were not used, and why')),
                ('ratings', models.PositiveIntegerField(help_text='Ratings by people that it learnt from')),
                ('suggested', models.PositiveIntegerField(default=0, help_text='Decisions it suggested a rating for')),
                ('figures', models.JSONField(default=dict, help_text='Accuracy, Brier score, calibration, on folds left out')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['agent', '-id'], name='rl_labelrun_agent_cd2b05_idx')],
            },
        ),
        migrations.CreateModel(
            name='LearnerSettings',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$')])),
                ('enabled', models.BooleanField(default=True, help_text='Also needs ENABLE_ONLINE_LEARNING')),
                ('min_samples_to_retrain', models.PositiveIntegerField(default=100, help_text='Feedback not learnt from yet that starts a retrain')),
                ('max_buffer_size', models.PositiveIntegerField(default=10000, help_text='Most new feedback that one retrain learns from, the newest; the rest waits for the next')),
                ('retrain_interval_hours', models.FloatField(default=24.0, help_text='After so long a smaller buffer is learnt from too; also the pause after a run that failed')),
                ('method', models.CharField(choices=rl.models.learning.method_choices, default='auto', max_length=32)),
                ('start_from', models.CharField(choices=[('base', 'the base model'), ('champion', "the champion's adapter")], default='base', max_length=16)),
                ('replay_share', models.FloatField(default=1.0, help_text='Share of the prompts with older feedback that a retrain sees again, 0 to 1')),
                ('gate', models.CharField(choices=[('champion', 'champion: better, it answers everybody'), ('challenger', 'challenger: not worse, an experiment decides'), ('none', 'none: a person decides')], default='champion', max_length=16)),
                ('auto_export', models.BooleanField(default=True)),
                ('auto_deploy', models.BooleanField(default=False)),
                ('auto_rollback', models.BooleanField(default=True, help_text='Put the champion before back where people rate this one surely worse')),
                ('keep_best', models.PositiveSmallIntegerField(default=3, help_text='Best retired policies that keep their files')),
                ('keep_newest', models.PositiveSmallIntegerField(default=5, help_text='Newest policies that keep their files')),
            ],
            options={
                'verbose_name_plural': 'learner settings',
                'ordering': ['agent'],
                'constraints': [models.CheckConstraint(condition=models.Q(('replay_share__gte', 0.0), ('replay_share__lte', 1.0)), name='learner_replay_in_0_1'), models.CheckConstraint(condition=models.Q(('max_buffer_size__gte', 1), ('min_samples_to_retrain__gte', 1)), name='learner_wants_a_sample')],
            },
        ),
        migrations.CreateModel(
            name='PromptSplit',
            fields=[
                ('prompt_hash', models.CharField(max_length=64, primary_key=True, serialize=False)),
                ('agent', models.CharField(max_length=64)),
                ('split', models.CharField(choices=[('train', 'Train'), ('eval', 'Eval'), ('holdout', 'Holdout')], max_length=8)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'indexes': [models.Index(fields=['agent', 'split'], name='prompt_split_by_agent')],
                'constraints': [models.CheckConstraint(condition=models.Q(('split__in', ['train', 'eval', 'holdout'])), name='prompt_split_known')],
            },
        ),
        migrations.CreateModel(
            name='RewardSettings',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$')])),
                ('immediate_weight', models.FloatField(default=0.2, help_text='What is known at once')),
                ('delayed_weight', models.FloatField(default=0.6, help_text='Ratings, comparisons, outcomes')),
                ('strategic_weight', models.FloatField(default=0.2, help_text='Tasks of the trace, strategic outcomes')),
                ('threshold', models.FloatField(default=0.5, help_text='Reward in [0, 1] from which a response that nobody rated is a good one; below it is a bad one')),
                ('functions', models.JSONField(blank=True, default=dict, help_text='Reward functions that speak at once, with weights: {"agent": 1, "efficiency": 0.5}; empty: the agent\'s own')),
                ('outcomes', models.JSONField(blank=True, default=dict, help_text='What outcomes say: {"ticket_reopened": {"good": 0, "bad": 1, "horizon": "delayed"}}; added to the agent\'s own')),
            ],
            options={
                'verbose_name_plural': 'reward settings',
                'ordering': ['agent'],
                'constraints': [models.CheckConstraint(condition=models.Q(('threshold__gt', 0.0), ('threshold__lt', 1.0)), name='reward_threshold_within_0_1')],
            },
        ),
        migrations.CreateModel(
            name='ServingSettings',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$')])),
                ('choose_temperature', models.FloatField(default=0.0, help_text='Of the softmax a listed response is drawn from: 0 the best, 1 as the policy would answer among them')),
                ('epsilon', models.FloatField(default=0.0, help_text='Share of choices among listed responses that is drawn evenly, 0 to 1')),
                ('temperature', models.FloatField(blank=True, help_text="Of written answers, 0 to 2; empty: the likeliest in process, a server's own", null=True)),
                ('max_tokens', models.PositiveIntegerField(blank=True, help_text='Longest written answer; empty: what the agent needs', null=True)),
            ],
            options={
                'verbose_name_plural': 'serving settings',
                'ordering': ['agent'],
                'constraints': [models.CheckConstraint(condition=models.Q(('epsilon__gte', 0.0), ('epsilon__lte', 1.0)), name='serving_epsilon_in_0_1'), models.CheckConstraint(condition=models.Q(('choose_temperature__gte', 0.0), models.Q(('temperature__isnull', True), models.Q(('temperature__gte', 0.0), ('temperature__lte', 2.0)), _connector='OR')), name='serving_temperature_not_negative')],
            },
        ),
        migrations.CreateModel(
            name='Snapshot',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64)),
                ('kind', models.CharField(choices=[('pairs', 'preference pairs'), ('labels', 'good and bad responses'), ('scores', 'scored responses'), ('corrections', 'demonstrations'), ('prompts', 'prompts'), ('groups', 'rated responses per prompt')], max_length=16)),
                ('path', models.CharField(help_text='Relative to RATCHET_HOME', max_length=500)),
                ('sha256', models.CharField(max_length=64)),
                ('counts', models.JSONField(default=dict, help_text='Rows per split')),
                ('sources', models.JSONField(default=dict, help_text='Rows per kind of evidence')),
                ('left_out', models.JSONField(default=dict, help_text='What was left out: {reason: count}')),
                ('query', models.JSONField(default=dict, help_text='What was asked: agent, source, margins, caps, newest feedback seen')),
                ('feedback_count', models.PositiveIntegerField(help_text='Ratings and comparisons that it was made from')),
                ('simulated_share', models.FloatField(default=0.0, help_text='Share of that feedback given by a simulated rater, 0 to 1')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['agent', '-id'], name='rl_snapshot_agent_717184_idx')],
                'constraints': [models.CheckConstraint(condition=models.Q(('simulated_share__gte', 0.0), ('simulated_share__lte', 1.0)), name='snapshot_simulated_share_in_0_1')],
            },
        ),
        migrations.CreateModel(
            name='TrainingRun',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64)),
                ('method', models.CharField(max_length=32)),
                ('status', models.CharField(choices=[('queued', 'Queued'), ('running', 'Running'), ('succeeded', 'Succeeded'), ('failed', 'Failed'), ('refused', 'Refused'), ('cancelled', 'Cancelled')], default='queued', max_length=16)),
                ('reason', models.TextField(blank=True, help_text='Why it was refused, failed or cancelled')),
                ('feedback_count', models.PositiveIntegerField(default=0, help_text='Ratings, comparisons, outcomes, traces and demonstrations that its training rows are of')),
                ('base_model', models.CharField(max_length=500)),
                ('base_model_hash', models.CharField(blank=True, max_length=100)),
                ('config', models.CharField(blank=True, help_text='Preset the recipe started from', max_length=32)),
                ('recipe', models.JSONField(default=dict)),
                ('seed', models.PositiveBigIntegerField(default=42)),
                ('code_version', models.CharField(blank=True, max_length=64)),
                ('libraries', models.JSONField(default=dict)),
                ('hardware', models.JSONField(default=dict)),
                ('output', models.CharField(blank=True, help_text='Folder, relative to RATCHET_HOME where inside it', max_length=500)),
                ('steps_total', models.PositiveIntegerField(default=0)),
                ('steps_done', models.PositiveIntegerField(default=0)),
                ('asked_by', models.CharField(blank=True, help_text='A person, a key, a command or the learner', max_length=200)),
                ('worker', models.CharField(blank=True, help_text='host:pid that claimed it', max_length=200)),
                ('attempts', models.PositiveSmallIntegerField(default=0, help_text='Times a worker took it')),
                ('cancel_requested', models.BooleanField(default=False)),
                ('dispatched_at', models.DateTimeField(blank=True, help_text='When it was last handed to the workers', null=True)),
                ('follow_up', models.CharField(blank=True, choices=[('wanted', 'Wanted'), ('done', 'Done'), ('failed', 'Failed')], help_text='Judging, promoting, exporting, deploying its policy', max_length=16)),
                ('follow_ups', models.PositiveSmallIntegerField(default=0, help_text='Times that was begun')),
                ('result', models.JSONField(default=dict, help_text='Final figures, without the histories (those are in result.json)')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('started_at', models.DateTimeField(blank=True, null=True)),
                ('heartbeat_at', models.DateTimeField(blank=True, null=True)),
                ('finished_at', models.DateTimeField(blank=True, null=True)),
                ('snapshot', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='runs', to='rl.snapshot')),
                ('stage_of', models.ForeignKey(blank=True, help_text='The run that needed this one first: its reward model was trained here', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='stages', to='rl.trainingrun')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='RunMetric',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('step', models.PositiveIntegerField()),
                ('values', models.JSONField(help_text='loss, rewards/accuracies, rewards/margins, kl, learning_rate, tokens_per_second')),
                ('at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='metrics', to='rl.trainingrun')),
            ],
            options={
                'ordering': ['run', 'step'],
            },
        ),
        migrations.CreateModel(
            name='RewardModelVersion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=200, unique=True)),
                ('agent', models.CharField(max_length=64)),
                ('stage', models.CharField(choices=[('candidate', 'Candidate'), ('champion', 'Champion'), ('retired', 'Retired'), ('rejected', 'Rejected')], default='candidate', max_length=16)),
                ('base_model', models.CharField(max_length=500)),
                ('base_model_hash', models.CharField(blank=True, max_length=100)),
                ('path', models.CharField(help_text='Folder, relative to RATCHET_HOME where inside it', max_length=500)),
                ('sha256', models.CharField(help_text='Of its adapter_model.safetensors', max_length=64)),
                ('objective', models.CharField(help_text='pairwise, regression or binary', max_length=16)),
                ('architecture', models.CharField(default='causal', max_length=16)),
                ('feedback_count', models.PositiveIntegerField(help_text='Ratings and comparisons it was trained from')),
                ('ranking', models.JSONField(default=dict, help_text='Share of held-out feedback ranked as people did, with its 95 % interval and what was ranked')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('run', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='reward_model', to='rl.trainingrun')),
            ],
            options={
                'verbose_name': 'reward model',
                'ordering': ['agent', '-id'],
            },
        ),
        migrations.CreateModel(
            name='Policy',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=200, unique=True)),
                ('agent', models.CharField(max_length=64)),
                ('kind', models.CharField(choices=[('adapter', 'LoRA adapter'), ('linear', 'linear')], default='adapter', max_length=16)),
                ('stage', models.CharField(choices=[('candidate', 'Candidate'), ('challenger', 'Challenger'), ('champion', 'Champion'), ('retired', 'Retired'), ('rejected', 'Rejected')], default='candidate', max_length=16)),
                ('base_model', models.CharField(max_length=500)),
                ('base_model_hash', models.CharField(max_length=100)),
                ('adapter_path', models.CharField(help_text='Folder of the adapter or linear policy, relative to RATCHET_HOME where inside it', max_length=500)),
                ('adapter_sha256', models.CharField(max_length=64)),
                ('feedback_count', models.PositiveIntegerField()),
                ('metrics', models.JSONField(default=dict, help_text='Figures of the newest evaluation on the holdout')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('parent', models.ForeignKey(blank=True, help_text='The champion it set out to beat', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='children', to='rl.policy')),
                ('run', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='policy', to='rl.trainingrun')),
            ],
            options={
                'verbose_name_plural': 'policies',
                'ordering': ['agent', '-id'],
            },
        ),
        migrations.CreateModel(
            name='Learnt',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('feedback', models.UUIDField(help_text='Id of a rating, comparison or outcome; or of a decision that was a demonstration, or whose trace spoke')),
                ('use', models.CharField(choices=[('trained', 'made a row that was trained on'), ('held_out', 'made a row that is kept for judging'), ('left_out', 'made no row')], default='left_out', max_length=8)),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='learnt', to='rl.trainingrun')),
            ],
            options={
                'verbose_name_plural': 'learnt',
            },
        ),
        migrations.CreateModel(
            name='BenchmarkResult',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('task', models.CharField(help_text='Name of the task', max_length=100)),
                ('task_version', models.CharField(blank=True, max_length=50)),
                ('task_sha256', models.CharField(blank=True, help_text="Of the task's files; empty for a task of the hub", max_length=64)),
                ('source', models.CharField(help_text="`bundled`, `hub`, or the path of the task's folder", max_length=500)),
                ('harness', models.CharField(help_text='Program that asked and scored, with its version', max_length=50)),
                ('metric', models.CharField(max_length=100)),
                ('fewshot', models.PositiveSmallIntegerField(default=0, help_text='Solved examples before each item')),
                ('chat_template', models.BooleanField(help_text='Whether items were asked as chat messages')),
                ('items_limit', models.PositiveIntegerField(blank=True, help_text='First items of the task alone; empty: all', null=True)),
                ('n', models.PositiveIntegerField(help_text='Items that both sides answered')),
                ('figures', models.JSONField(help_text='own, base: value and standard error; difference: value with its 95 % interval and p')),
                ('items', models.JSONField(help_text='Per item its hash, and the scores of policy and base')),
                ('base_model_hash', models.CharField(max_length=100)),
                ('seconds', models.FloatField()),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('policy', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='benchmarks', to='rl.policy')),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['policy', 'task', '-id'], name='rl_benchmar_policy__2bb571_idx')],
                'constraints': [models.CheckConstraint(condition=models.Q(('n__gte', 1)), name='benchmark_has_items')],
            },
        ),
        migrations.CreateModel(
            name='Artifact',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('format', models.CharField(max_length=16)),
                ('quantization', models.CharField(blank=True, max_length=16)),
                ('path', models.CharField(help_text='Relative to RATCHET_HOME where inside it', max_length=500)),
                ('bytes', models.PositiveBigIntegerField()),
                ('sha256', models.CharField(max_length=64)),
                ('checked', models.JSONField(default=dict, help_text='What was compared with the original, and the figures')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('policy', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='artifacts', to='rl.policy')),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.UniqueConstraint(fields=('policy', 'path'), name='artifact_once_per_path')],
            },
        ),
        migrations.CreateModel(
            name='Arm',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'A name is a slug of 1 to 64 lower-case letters, digits, - and _, such as shorter-answers.')])),
                ('weight', models.FloatField(default=1.0, help_text="Its share, relative to the other arms' weights")),
                ('is_control', models.BooleanField(default=False, help_text='What the others are compared with')),
                ('experiment', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='arms', to='rl.experiment')),
                ('policy', models.ForeignKey(blank=True, help_text='Empty: the base model', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='arms', to='rl.policy')),
            ],
            options={
                'ordering': ['-is_control', 'id'],
                'constraints': [models.UniqueConstraint(fields=('experiment', 'name'), name='arm_once_per_name'), models.UniqueConstraint(condition=models.Q(('is_control', True)), fields=('experiment',), name='arm_one_control'), models.CheckConstraint(condition=models.Q(('weight__gt', 0.0)), name='arm_weight_positive')],
            },
        ),
        migrations.CreateModel(
            name='PolicyEvent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('registered', 'Registered'), ('evaluated', 'Evaluated'), ('benchmarked', 'Benchmarked'), ('exported', 'Exported'), ('gated', 'Gated'), ('deployed', 'Deployed'), ('pruned', 'Pruned'), ('promoted', 'Promoted'), ('rejected', 'Rejected'), ('retired', 'Retired'), ('rolled_back', 'Rolled Back'), ('watched', 'watched in use')], max_length=16)),
                ('from_stage', models.CharField(blank=True, max_length=16)),
                ('to_stage', models.CharField(blank=True, max_length=16)),
                ('actor', models.CharField(help_text="Who did it: a user's name, or the command or job", max_length=200)),
                ('reason', models.TextField(blank=True)),
                ('forced', models.BooleanField(default=False)),
                ('verdicts', models.JSONField(blank=True, default=dict)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('policy', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='events', to='rl.policy')),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.CheckConstraint(condition=models.Q(('forced', False), models.Q(('reason', ''), _negated=True), _connector='OR'), name='event_forced_has_reason')],
            },
        ),
        migrations.CreateModel(
            name='RewardModelEvent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('registered', 'Registered'), ('evaluated', 'Evaluated'), ('promoted', 'Promoted'), ('refused', 'not promoted'), ('retired', 'Retired'), ('rejected', 'Rejected')], max_length=16)),
                ('from_stage', models.CharField(blank=True, max_length=16)),
                ('to_stage', models.CharField(blank=True, max_length=16)),
                ('actor', models.CharField(help_text="A user's name, or the command or job", max_length=200)),
                ('reason', models.TextField(blank=True)),
                ('forced', models.BooleanField(default=False)),
                ('figures', models.JSONField(blank=True, default=dict)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('reward_model', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='events', to='rl.rewardmodelversion')),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.CheckConstraint(condition=models.Q(('forced', False), models.Q(('reason', ''), _negated=True), _connector='OR'), name='reward_model_event_forced_has_reason')],
            },
        ),
        migrations.CreateModel(
            name='RewardRecord',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('decision', models.UUIDField(help_text='Id of the decision')),
                ('agent', models.CharField(max_length=64)),
                ('raw', models.FloatField(help_text='In [-2, 2]; empty where nothing spoke', null=True)),
                ('value', models.FloatField(help_text='The same in [0, 1]', null=True)),
                ('immediate', models.FloatField(help_text='What was known at once, in [-2, 2]', null=True)),
                ('delayed', models.FloatField(help_text='What people and the app said later, in [-2, 2]', null=True)),
                ('strategic', models.FloatField(help_text='What it led to, in [-2, 2]', null=True)),
                ('components', models.JSONField(help_text='Each horizon with its weight and its parts')),
                ('simulated', models.BooleanField(default=False, help_text='Whether a simulated rater had a say in it')),
                ('measured', models.BooleanField(default=False, help_text='Whether an outcome, its trace or a function the operator named spoke, beside people and form')),
                ('rows_said', models.PositiveIntegerField(help_text='Rows of feedback on the decision that it was made from')),
                ('basis', models.CharField(help_text='SHA-256 of its numbers', max_length=64)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('supersedes', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='superseded_by', to='rl.rewardrecord')),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['decision', '-id'], name='rl_rewardre_decisio_c525d5_idx'), models.Index(fields=['agent', 'raw'], name='rl_rewardre_agent_fd5bd4_idx')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('supersedes__isnull', True)), fields=('decision',), name='reward_one_first_per_decision'), models.CheckConstraint(condition=models.Q(('value__isnull', True), models.Q(('value__gte', 0.0), ('value__lte', 1.0)), _connector='OR'), name='reward_value_in_0_1'), models.CheckConstraint(condition=models.Q(('raw__isnull', True), models.Q(('raw__gte', -2.0), ('raw__lte', 2.0)), _connector='OR'), name='reward_raw_in_2_2'), models.CheckConstraint(condition=models.Q(('immediate__isnull', True), models.Q(('immediate__gte', -2.0), ('immediate__lte', 2.0)), _connector='OR'), name='reward_immediate_in_2_2'), models.CheckConstraint(condition=models.Q(('delayed__isnull', True), models.Q(('delayed__gte', -2.0), ('delayed__lte', 2.0)), _connector='OR'), name='reward_delayed_in_2_2'), models.CheckConstraint(condition=models.Q(('strategic__isnull', True), models.Q(('strategic__gte', -2.0), ('strategic__lte', 2.0)), _connector='OR'), name='reward_strategic_in_2_2')],
            },
        ),
        migrations.CreateModel(
            name='Evaluation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64)),
                ('checkpoint', models.CharField(blank=True, help_text='Where no policy was named', max_length=500)),
                ('base_model', models.CharField(max_length=500)),
                ('against', models.CharField(blank=True, help_text="`base`, a policy's name, or empty", max_length=200)),
                ('split', models.CharField(default='holdout', max_length=16)),
                ('samples', models.PositiveIntegerField()),
                ('figures', models.JSONField()),
                ('evidence', models.JSONField(default=dict, help_text='Per prompt what both sides did: what a gate asks')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('policy', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='evaluations', to='rl.policy')),
                ('snapshot', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='evaluations', to='rl.snapshot')),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['agent', '-id'], name='rl_evaluati_agent_808c8b_idx')],
            },
        ),
        migrations.AddIndex(
            model_name='trainingrun',
            index=models.Index(fields=['agent', '-id'], name='rl_training_agent_a7e5bd_idx'),
        ),
        migrations.AddIndex(
            model_name='trainingrun',
            index=models.Index(fields=['status'], name='rl_training_status_d27c1c_idx'),
        ),
        migrations.AddConstraint(
            model_name='trainingrun',
            constraint=models.CheckConstraint(condition=models.Q(('status__in', ['queued', 'running', 'succeeded', 'failed', 'refused', 'cancelled'])), name='run_status_known'),
        ),
        migrations.AddConstraint(
            model_name='trainingrun',
            constraint=models.CheckConstraint(condition=models.Q(('status__in', ['queued', 'running']), ('finished_at__isnull', False), _connector='OR'), name='run_ended_has_end'),
        ),
        migrations.AddConstraint(
            model_name='trainingrun',
            constraint=models.UniqueConstraint(condition=models.Q(('asked_by', 'online learner'), ('status__in', ['queued', 'running'])), fields=('agent',), name='run_one_learner_per_agent'),
        ),
        migrations.AddConstraint(
            model_name='runmetric',
            constraint=models.UniqueConstraint(fields=('run', 'step'), name='metric_once_per_step'),
        ),
        migrations.AddIndex(
            model_name='rewardmodelversion',
            index=models.Index(fields=['agent', 'stage'], name='rl_rewardmo_agent_f57b04_idx'),
        ),
        migrations.AddConstraint(
            model_name='rewardmodelversion',
            constraint=models.UniqueConstraint(condition=models.Q(('stage', 'champion')), fields=('agent',), name='reward_model_one_champion_per_agent'),
        ),
        migrations.AddConstraint(
            model_name='rewardmodelversion',
            constraint=models.CheckConstraint(condition=models.Q(('stage__in', ['candidate', 'champion', 'retired', 'rejected'])), name='reward_model_stage_known'),
        ),
        migrations.AddIndex(
            model_name='policy',
            index=models.Index(fields=['agent', 'stage'], name='rl_policy_agent_0cb943_idx'),
        ),
        migrations.AddConstraint(
            model_name='policy',
            constraint=models.UniqueConstraint(condition=models.Q(('stage', 'champion')), fields=('agent',), name='policy_one_champion_per_agent'),
        ),
        migrations.AddConstraint(
            model_name='policy',
            constraint=models.CheckConstraint(condition=models.Q(('stage__in', ['candidate', 'challenger', 'champion', 'retired', 'rejected'])), name='policy_stage_known'),
        ),
        migrations.AddConstraint(
            model_name='policy',
            constraint=models.CheckConstraint(condition=models.Q(('kind__in', ['adapter', 'linear'])), name='policy_kind_known'),
        ),
        migrations.AddIndex(
            model_name='learnt',
            index=models.Index(fields=['feedback'], name='rl_learnt_feedbac_b47d40_idx'),
        ),
        migrations.AddConstraint(
            model_name='learnt',
            constraint=models.UniqueConstraint(fields=('run', 'feedback'), name='learnt_once_per_run'),
        ),
        migrations.AddConstraint(
            model_name='learnt',
            constraint=models.CheckConstraint(condition=models.Q(('use__in', ['trained', 'held_out', 'left_out'])), name='learnt_use_known'),
        ),
        migrations.RunPython(roles.grant, migrations.RunPython.noop),
        migrations.RunPython(gates.grant, migrations.RunPython.noop),
        migrations.RunPython(experiments.grant, migrations.RunPython.noop),
        migrations.RunPython(rewards.grant, migrations.RunPython.noop),
        migrations.RunPython(rewards.schedule, migrations.RunPython.noop),
        migrations.RunPython(agent_definitions.grant, migrations.RunPython.noop),
        migrations.RunPython(serving.grant, migrations.RunPython.noop),
        migrations.RunPython(label_runs.grant, migrations.RunPython.noop),
    ]
