"""The tables."""

import django.core.validators
import django.db.models.deletion
import django.utils.timezone
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='AgentName',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'An agent is a slug of 1 to 64 lower-case letters, digits, - and _, such as support-bot.')])),
                ('hashed_as', models.CharField(max_length=80, unique=True)),
            ],
            options={
                'ordering': ['agent'],
            },
        ),
        migrations.CreateModel(
            name='ApiKey',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True)),
                ('prefix', models.CharField(editable=False, help_text='First characters, to tell keys apart', max_length=12, unique=True)),
                ('key_hash', models.CharField(editable=False, max_length=64, unique=True)),
                ('scopes', models.JSONField(default=list, help_text='Of ingest, rate, rate_as, read, operate')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('last_used_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('revoked_at', models.DateTimeField(blank=True, null=True)),
            ],
            options={
                'verbose_name': 'API key',
                'ordering': ['name'],
            },
        ),
        migrations.CreateModel(
            name='AgentSettings',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('agent', models.CharField(max_length=64, unique=True, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'An agent is a slug of 1 to 64 lower-case letters, digits, - and _, such as support-bot.')])),
                ('collection_rate', models.FloatField(default=1.0, help_text='Share of decisions kept, 0 to 1, by hash of their id')),
                ('ratings_wanted', models.PositiveSmallIntegerField(default=1, help_text="Ratings by people after which a decision leaves everyone's queue")),
                ('overlap_share', models.FloatField(default=0.0, help_text='Share of decisions, 0 to 1, that wait for `overlap_ratings`, so that agreement shows')),
                ('overlap_ratings', models.PositiveSmallIntegerField(default=2)),
                ('aggregation', models.CharField(choices=[('majority', 'majority of the raters'), ('dawid_skene', "weighted by each rater's reliability (Dawid-Skene)")], default='majority', max_length=12)),
            ],
            options={
                'verbose_name_plural': 'agent settings',
                'ordering': ['agent'],
                'constraints': [models.CheckConstraint(condition=models.Q(('collection_rate__gte', 0.0), ('collection_rate__lte', 1.0)), name='agent_collection_rate_in_0_1'), models.CheckConstraint(condition=models.Q(('overlap_share__gte', 0.0), ('overlap_share__lte', 1.0)), name='agent_overlap_share_in_0_1'), models.CheckConstraint(condition=models.Q(('overlap_ratings__gte', 1), ('ratings_wanted__gte', 1)), name='agent_wants_a_rating')],
            },
        ),
        migrations.CreateModel(
            name='ImportBatch',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('file', models.CharField(help_text='Name of the file, without its folder', max_length=255)),
                ('sha256', models.CharField(help_text='Of the file as it was read', max_length=64)),
                ('bytes', models.PositiveBigIntegerField(help_text='Of the file as it was read')),
                ('ratings_file', models.CharField(blank=True, help_text='Name of the second file, of formats that have two', max_length=255)),
                ('format', models.CharField(max_length=40)),
                ('agent', models.CharField(blank=True, help_text='Whose decisions it brought; empty: several', max_length=64)),
                ('counts', models.JSONField(default=dict, help_text='rows, rows_stored, already_here, skipped, refused, and rows made: decisions, ratings, ...')),
                ('skipped_because', models.JSONField(blank=True, default=dict, help_text='Rows skipped: {reason: count}')),
                ('refused', models.JSONField(blank=True, default=list, help_text='The first refused rows: [{line, key, reason}]')),
                ('notes', models.JSONField(blank=True, default=list, help_text='What the reader of the format wants known')),
                ('licence', models.CharField(blank=True, help_text='Licence of the data, where it was stated', max_length=200)),
                ('options', models.JSONField(blank=True, default=dict, help_text='How it was read: column map, agent, simulated')),
                ('attached', models.JSONField(blank=True, default=list, editable=False, help_text='Ids of earlier decisions that it gave a trace')),
                ('actor', models.CharField(help_text='A person, a key, or the command', max_length=200)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('undone_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('undone_by', models.CharField(blank=True, max_length=200)),
                ('undone', models.JSONField(blank=True, default=dict, help_text='What was removed and kept, and what had been trained on it')),
            ],
            options={
                'verbose_name_plural': 'import batches',
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['sha256'], name='feedback_im_sha256_2bc82c_idx'), models.Index(fields=['agent', '-id'], name='feedback_im_agent_e439d3_idx')],
                'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('undone_at__isnull', True), ('undone_by', '')), ('undone_at__isnull', False), _connector='OR'), name='import_undone_has_time')],
            },
        ),
        migrations.CreateModel(
            name='ProblemRow',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('decision', models.UUIDField(help_text='Id of the decision; it may be gone since')),
                ('agent', models.CharField(max_length=64)),
                ('reader', models.CharField(help_text='The reader that skipped it: dataset, rewards, export, ...', max_length=40)),
                ('reason', models.CharField(help_text='The error, as a line', max_length=500)),
                ('first_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('last_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'ordering': ['-last_at', '-id'],
                'indexes': [models.Index(fields=['agent', 'reader'], name='problem_by_reader')],
                'constraints': [models.UniqueConstraint(fields=('decision', 'reader'), name='problem_once_per_reader')],
            },
        ),
        migrations.CreateModel(
            name='Tombstone',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(choices=[('salt', 'Salt'), ('decision', 'Decision'), ('trace', 'Trace'), ('unit', 'Unit')], max_length=8)),
                ('digest', models.CharField(help_text="HMAC-SHA-256 under this installation's salt; the salt itself", max_length=64)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.UniqueConstraint(fields=('kind', 'digest'), name='tombstone_once'), models.UniqueConstraint(condition=models.Q(('kind', 'salt')), fields=('kind',), name='tombstone_one_salt'), models.CheckConstraint(condition=models.Q(('kind__in', ['salt', 'decision', 'trace', 'unit'])), name='tombstone_kind_known')],
            },
        ),
        migrations.CreateModel(
            name='Trace',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('agent', models.CharField(max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'An agent is a slug of 1 to 64 lower-case letters, digits, - and _, such as support-bot.')])),
                ('run_id', models.CharField(blank=True, help_text="The app's own id of the run", max_length=200)),
                ('steps', models.JSONField(help_text='[{kind, name, ...}, ...] in the order they happened')),
                ('metadata', models.JSONField(blank=True, default=dict)),
                ('started_at', models.DateTimeField(blank=True, null=True)),
                ('finished_at', models.DateTimeField(blank=True, null=True)),
                ('body_hash', models.CharField(blank=True, editable=False, max_length=64)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('import_batch', models.ForeignKey(blank=True, db_index=False, editable=False, help_text='The import that brought it; empty: it was recorded here', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='traces', to='feedback.importbatch')),
            ],
            options={
                'ordering': ['-created_at', '-id'],
            },
        ),
        migrations.CreateModel(
            name='Withdrawal',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('selection', models.JSONField(default=dict, help_text='How they were chosen: ids, batch, agent, unit, since, until, source')),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('actor', models.CharField(help_text='A person, a key, or the command', max_length=200)),
                ('decisions_count', models.PositiveIntegerField(help_text='Decisions withdrawn by it')),
                ('trained_on', models.JSONField(blank=True, default=dict, help_text='Runs, policies, snapshots, ... that had read them: names and numbers')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('restored_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('restored_by', models.CharField(blank=True, max_length=200)),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('restored_at__isnull', True), ('restored_by', '')), ('restored_at__isnull', False), _connector='OR'), name='withdrawal_restored_has_time')],
            },
        ),
        migrations.CreateModel(
            name='Decision',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('agent', models.CharField(max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'An agent is a slug of 1 to 64 lower-case letters, digits, - and _, such as support-bot.')])),
                ('messages', models.JSONField(help_text='The prompt as chat messages: [{role, content}, ...]')),
                ('prompt_hash', models.CharField(editable=False, max_length=64)),
                ('response', models.TextField(help_text='The answer exactly as the policy gave it')),
                ('reasoning', models.TextField(blank=True, default='', help_text='What the model thought before it answered')),
                ('state', models.JSONField(blank=True, help_text='What the app knew when it asked', null=True)),
                ('candidates', models.JSONField(blank=True, help_text='The listed responses: texts, or {response, score} with a score in [0, 1]', null=True)),
                ('policy', models.CharField(blank=True, help_text='Name of the policy that answered, as it was then; empty: unknown', max_length=200)),
                ('unit', models.CharField(blank=True, help_text='The user or session this was decided for', max_length=200)),
                ('arm', models.CharField(blank=True, max_length=200)),
                ('propensity', models.FloatField(blank=True, help_text='Probability of the recorded choice, in (0, 1]', null=True)),
                ('run_id', models.CharField(blank=True, help_text="The app's own id of the run this belongs to", max_length=200)),
                ('latency_ms', models.FloatField(blank=True, null=True)),
                ('tokens_in', models.PositiveIntegerField(blank=True, null=True)),
                ('tokens_out', models.PositiveIntegerField(blank=True, null=True)),
                ('tags', models.JSONField(blank=True, default=list)),
                ('metadata', models.JSONField(blank=True, default=dict)),
                ('source', models.CharField(default='app', help_text='app, simulation, or the format it came from', max_length=40)),
                ('body_hash', models.CharField(blank=True, editable=False, help_text='SHA-256 of the request that made it: tells a retry from a conflict', max_length=64)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('ratings_human', models.PositiveSmallIntegerField(default=0, editable=False, help_text='Standing ratings by people')),
                ('ratings_wanted', models.PositiveSmallIntegerField(default=1, editable=False, help_text='0 while it is withdrawn: it is in no queue')),
                ('annotation_priority', models.FloatField(default=0.0, editable=False, help_text="0 to 2: the policy's uncertainty plus its raters' disagreement")),
                ('import_batch', models.ForeignKey(blank=True, db_index=False, editable=False, help_text='The import that brought it; empty: it was recorded here', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='decisions', to='feedback.importbatch')),
                ('trace', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='decisions', to='feedback.trace')),
                ('withdrawal', models.ForeignKey(blank=True, db_index=False, editable=False, help_text='The withdrawal that excluded it; empty: not withdrawn', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='decisions', to='feedback.withdrawal')),
            ],
            options={
                'ordering': ['-created_at', '-id'],
            },
        ),
        migrations.CreateModel(
            name='Comparison',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('rater', models.CharField(max_length=200)),
                ('rater_kind', models.CharField(choices=[('human', 'a person'), ('simulated', 'simulated')], default='human', max_length=12)),
                ('preference', models.CharField(blank=True, choices=[('left', 'left is better'), ('right', 'right is better'), ('tie', 'equally good'), ('both_bad', 'both bad')], max_length=8)),
                ('tags', models.JSONField(blank=True, default=list)),
                ('notes', models.TextField(blank=True)),
                ('withdrawn', models.BooleanField(default=False)),
                ('body_hash', models.CharField(blank=True, editable=False, max_length=64)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('supersedes', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='superseded_by', to='feedback.comparison')),
                ('left', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='comparisons_left', to='feedback.decision')),
                ('right', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='comparisons_right', to='feedback.decision')),
                ('import_batch', models.ForeignKey(blank=True, db_index=False, editable=False, help_text='The import that brought it; empty: it was recorded here', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='comparisons', to='feedback.importbatch')),
            ],
            options={
                'ordering': ['-created_at', '-id'],
                'indexes': [models.Index(fields=['rater', '-created_at'], name='feedback_co_rater_793ecf_idx'), models.Index(fields=['-created_at'], name='feedback_co_created_2fa7a1_idx'), models.Index(condition=models.Q(('import_batch__isnull', False)), fields=['import_batch'], name='comparison_imported')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('supersedes__isnull', True)), fields=('left', 'right', 'rater'), name='comparison_one_first_per_rater'), models.CheckConstraint(condition=models.Q(('left', models.F('right')), _negated=True), name='comparison_of_two_decisions'), models.CheckConstraint(condition=models.Q(('preference__in', ['left', 'right', 'tie', 'both_bad']), models.Q(('preference', ''), ('withdrawn', True)), _connector='OR'), name='comparison_preference_known'), models.CheckConstraint(condition=models.Q(('rater', ''), _negated=True), name='comparison_has_rater'), models.CheckConstraint(condition=models.Q(('withdrawn', False), ('supersedes__isnull', False), _connector='OR'), name='comparison_withdrawal_withdraws_something')],
            },
        ),
        migrations.CreateModel(
            name='Lease',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('rater', models.CharField(max_length=200)),
                ('until', models.DateTimeField()),
                ('decision', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='leases', to='feedback.decision')),
            ],
            options={
                'ordering': ['until'],
                'indexes': [models.Index(fields=['until'], name='feedback_le_until_59b8bf_idx')],
                'constraints': [models.UniqueConstraint(fields=('decision', 'rater'), name='lease_once_per_rater')],
            },
        ),
        migrations.CreateModel(
            name='Outcome',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=64, validators=[django.core.validators.RegexValidator('^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$', 'An agent is a slug of 1 to 64 lower-case letters, digits, - and _, such as support-bot.')])),
                ('value', models.FloatField()),
                ('at', models.DateTimeField(default=django.utils.timezone.now, help_text='When it happened in the app')),
                ('body_hash', models.CharField(blank=True, editable=False, max_length=64)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('decision', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='outcomes', to='feedback.decision')),
                ('import_batch', models.ForeignKey(blank=True, db_index=False, editable=False, help_text='The import that brought it; empty: it was recorded here', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='outcomes', to='feedback.importbatch')),
            ],
            options={
                'ordering': ['-at', '-id'],
                'indexes': [models.Index(fields=['name', '-at'], name='feedback_ou_name_d1cd47_idx'), models.Index(condition=models.Q(('import_batch__isnull', False)), fields=['import_batch'], name='outcome_imported')],
                'constraints': [models.CheckConstraint(condition=models.Q(('name', ''), _negated=True), name='outcome_has_name')],
            },
        ),
        migrations.CreateModel(
            name='Rating',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('rater', models.CharField(max_length=200)),
                ('rater_kind', models.CharField(choices=[('human', 'a person'), ('simulated', 'simulated')], default='human', max_length=12)),
                ('thumb', models.CharField(blank=True, choices=[('up', 'good'), ('down', 'bad')], max_length=4)),
                ('stars', models.PositiveSmallIntegerField(blank=True, null=True)),
                ('score', models.FloatField(blank=True, null=True)),
                ('correction', models.TextField(blank=True, help_text='The response it should have been', null=True)),
                ('tags', models.JSONField(blank=True, default=list)),
                ('notes', models.TextField(blank=True)),
                ('withdrawn', models.BooleanField(default=False, help_text='This row takes back the one it supersedes')),
                ('body_hash', models.CharField(blank=True, editable=False, max_length=64)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('decision', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='ratings', to='feedback.decision')),
                ('import_batch', models.ForeignKey(blank=True, db_index=False, editable=False, help_text='The import that brought it; empty: it was recorded here', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='ratings', to='feedback.importbatch')),
                ('supersedes', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='superseded_by', to='feedback.rating')),
            ],
            options={
                'ordering': ['-created_at', '-id'],
                'indexes': [models.Index(fields=['rater', '-created_at'], name='feedback_ra_rater_75bc9e_idx'), models.Index(fields=['-created_at'], name='feedback_ra_created_bba8dd_idx'), models.Index(condition=models.Q(('import_batch__isnull', False)), fields=['import_batch'], name='rating_imported')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('supersedes__isnull', True)), fields=('decision', 'rater'), name='rating_one_first_per_rater'), models.CheckConstraint(condition=models.Q(('stars__isnull', True), models.Q(('stars__gte', 1), ('stars__lte', 5)), _connector='OR'), name='rating_stars_1_to_5'), models.CheckConstraint(condition=models.Q(('score__isnull', True), models.Q(('score__gte', 0.0), ('score__lte', 1.0)), _connector='OR'), name='rating_score_in_0_1'), models.CheckConstraint(condition=models.Q(('thumb__in', ['', 'up', 'down'])), name='rating_thumb_known'), models.CheckConstraint(condition=models.Q(('rater', ''), _negated=True), name='rating_has_rater'), models.CheckConstraint(condition=models.Q(('withdrawn', False), ('supersedes__isnull', False), _connector='OR'), name='rating_withdrawal_withdraws_something'), models.CheckConstraint(condition=models.Q(('withdrawn', True), models.Q(('thumb', ''), _negated=True), ('stars__isnull', False), ('score__isnull', False), ('correction__isnull', False), models.Q(('notes', ''), _negated=True), models.Q(('tags', []), _negated=True), _connector='OR'), name='rating_says_something')],
            },
        ),
        migrations.CreateModel(
            name='RatingRequest',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('purpose', models.CharField(choices=[('verdict', 'may change a verdict'), ('sample', 'random sample')], max_length=8)),
                ('probability', models.FloatField(help_text='Chance that this decision was drawn among those that could have been')),
                ('place', models.FloatField(help_text='Random number in [0, 1) by which requests are ordered')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('decision', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='requests', to='feedback.decision')),
            ],
            options={
                'ordering': ['-purpose', 'place'],
                'constraints': [models.UniqueConstraint(fields=('decision', 'purpose'), name='rating_request_once_per_purpose'), models.CheckConstraint(condition=models.Q(('purpose__in', ['verdict', 'sample'])), name='rating_request_purpose_known'), models.CheckConstraint(condition=models.Q(('probability__gt', 0), ('probability__lte', 1)), name='rating_request_probability_in_0_1')],
            },
        ),
        migrations.CreateModel(
            name='Suggestion',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('labeller', models.CharField(help_text='Which label model', max_length=200)),
                ('good', models.FloatField(help_text='Calibrated probability that a person finds it good, 0 to 1')),
                ('outcome', models.CharField(blank=True, choices=[('accepted', 'accepted'), ('agreed', 'rated the same without accepting it'), ('overruled', 'rated otherwise')], max_length=12)),
                ('rating', models.UUIDField(blank=True, help_text='The rating it was settled by', null=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('settled_at', models.DateTimeField(blank=True, editable=False, null=True)),
                ('decision', models.OneToOneField(on_delete=django.db.models.deletion.PROTECT, related_name='suggestion', to='feedback.decision')),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['labeller', 'outcome'], name='feedback_su_labelle_90dfe5_idx'), models.Index(fields=['rating'], name='feedback_su_rating_0b4ff4_idx')],
                'constraints': [models.CheckConstraint(condition=models.Q(('good__gte', 0.0), ('good__lte', 1.0)), name='suggestion_good_in_0_1'), models.CheckConstraint(condition=models.Q(models.Q(('outcome', ''), ('rating__isnull', True)), models.Q(('outcome__in', ['accepted', 'agreed', 'overruled']), ('rating__isnull', False)), _connector='OR'), name='suggestion_settled_by_a_rating')],
            },
        ),
        migrations.AddIndex(
            model_name='trace',
            index=models.Index(fields=['agent', '-created_at'], name='feedback_tr_agent_171914_idx'),
        ),
        migrations.AddIndex(
            model_name='trace',
            index=models.Index(fields=['run_id'], name='feedback_tr_run_id_d32c2a_idx'),
        ),
        migrations.AddIndex(
            model_name='trace',
            index=models.Index(condition=models.Q(('import_batch__isnull', False)), fields=['import_batch'], name='trace_imported'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(condition=models.Q(('ratings_human__lt', models.F('ratings_wanted'))), fields=['agent', 'ratings_human', '-annotation_priority', 'created_at', 'id'], name='decision_asking_by_agent'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(condition=models.Q(('ratings_human__lt', models.F('ratings_wanted'))), fields=['ratings_human', '-annotation_priority', 'created_at', 'id'], name='decision_asking'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(condition=models.Q(('ratings_human__lt', models.F('ratings_wanted')), models.Q(('policy', ''), _negated=True)), fields=['policy', 'ratings_human', '-annotation_priority', 'created_at', 'id', 'agent'], name='decision_asking_by_policy'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(condition=models.Q(('ratings_human__gt', 0)), fields=['agent', 'prompt_hash'], name='decision_prompt_rated'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(fields=['agent', '-created_at'], name='feedback_de_agent_613f20_idx'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(fields=['agent', 'prompt_hash'], name='feedback_de_agent_d9f40c_idx'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(fields=['-created_at', '-id'], name='feedback_de_created_7defb8_idx'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(fields=['policy', '-created_at', '-id', 'agent'], name='decision_newest_by_policy'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(condition=models.Q(('arm', ''), _negated=True), fields=['arm', 'created_at'], name='decision_arm'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(condition=models.Q(('import_batch__isnull', False)), fields=['import_batch', '-created_at', '-id'], name='decision_imported'),
        ),
        migrations.AddIndex(
            model_name='decision',
            index=models.Index(condition=models.Q(('withdrawal__isnull', False)), fields=['withdrawal'], name='decision_withdrawn'),
        ),
        migrations.AddConstraint(
            model_name='decision',
            constraint=models.CheckConstraint(condition=models.Q(('propensity__isnull', True), models.Q(('propensity__gt', 0.0), ('propensity__lte', 1.0)), _connector='OR'), name='decision_propensity_in_0_1'),
        ),
        migrations.AddConstraint(
            model_name='decision',
            constraint=models.CheckConstraint(condition=models.Q(('latency_ms__isnull', True), ('latency_ms__gte', 0.0), _connector='OR'), name='decision_latency_not_negative'),
        ),
        migrations.AddConstraint(
            model_name='decision',
            constraint=models.CheckConstraint(condition=models.Q(('agent', ''), _negated=True), name='decision_has_agent'),
        ),
        migrations.AddConstraint(
            model_name='decision',
            constraint=models.CheckConstraint(condition=models.Q(('prompt_hash', ''), _negated=True), name='decision_has_prompt_hash'),
        ),
    ]
