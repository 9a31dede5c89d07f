import django.core.validators
import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("rl", "0026_agent_base"),
    ]

    operations = [
        migrations.CreateModel(
            name="Upstream",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "name",
                    models.CharField(
                        max_length=64,
                        unique=True,
                        validators=[
                            django.core.validators.RegexValidator("^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$")
                        ],
                    ),
                ),
                (
                    "url",
                    models.CharField(help_text="Base URL, such as https://api.openai.com/v1", max_length=500),
                ),
                (
                    "model",
                    models.CharField(help_text="The provider's model id, such as gpt-5-mini", max_length=200),
                ),
                (
                    "dialect",
                    models.CharField(
                        choices=[
                            ("openai", "OpenAI chat completions"),
                            ("responses", "OpenAI responses"),
                            ("anthropic", "Anthropic messages"),
                        ],
                        default="openai",
                        max_length=16,
                    ),
                ),
                (
                    "schemas",
                    models.CharField(
                        choices=[
                            ("json_schema", "JSON schema"),
                            ("json_object", "JSON object without a schema"),
                            ("none", "not at all"),
                        ],
                        default="json_schema",
                        help_text="How the endpoint is told the form of an answer",
                        max_length=16,
                    ),
                ),
                (
                    "key_env",
                    models.CharField(
                        blank=True, help_text="Environment variable that holds the API key", max_length=100
                    ),
                ),
                ("key_encrypted", models.TextField(blank=True, editable=False)),
                ("timeout_s", models.FloatField(default=60.0, help_text="Seconds an answer may take")),
                (
                    "connect_timeout_s",
                    models.FloatField(default=5.0, help_text="Seconds a connection may take"),
                ),
                (
                    "concurrency",
                    models.PositiveIntegerField(
                        default=32, help_text="Requests at once, at most, per process"
                    ),
                ),
                (
                    "context_tokens",
                    models.PositiveIntegerField(
                        blank=True,
                        help_text="Prompt and answer together, in tokens; empty: unknown",
                        null=True,
                    ),
                ),
                (
                    "forward_fields",
                    models.BooleanField(
                        default=False, help_text="Send the request's `metadata` and `user` to the endpoint"
                    ),
                ),
                (
                    "price_in",
                    models.FloatField(
                        blank=True,
                        help_text="US dollars per million prompt tokens; empty: the bundled price table",
                        null=True,
                    ),
                ),
                (
                    "price_cached",
                    models.FloatField(
                        blank=True,
                        help_text="US dollars per million prompt tokens that the provider had cached",
                        null=True,
                    ),
                ),
                (
                    "price_out",
                    models.FloatField(
                        blank=True, help_text="US dollars per million tokens answered", null=True
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "ordering": ["name"],
            },
        ),
        migrations.RemoveConstraint(
            model_name="policy",
            name="policy_kind_known",
        ),
        migrations.AddField(
            model_name="policy",
            name="parameters",
            field=models.JSONField(
                blank=True,
                default=dict,
                help_text='Of a hosted policy: parameters sent with each request, such as {"temperature": 0.2}',
            ),
        ),
        migrations.AddField(
            model_name="policy",
            name="recorded_as",
            field=models.CharField(
                blank=True,
                help_text="Of a recorded policy: the policy name in its decisions; empty where they name none",
                max_length=200,
            ),
        ),
        migrations.AlterField(
            model_name="policy",
            name="adapter_path",
            field=models.CharField(
                blank=True,
                help_text="Folder of the adapter or linear policy, relative to RATCHET_HOME where inside it",
                max_length=500,
            ),
        ),
        migrations.AlterField(
            model_name="policy",
            name="adapter_sha256",
            field=models.CharField(blank=True, max_length=64),
        ),
        migrations.AlterField(
            model_name="policy",
            name="base_model",
            field=models.CharField(
                blank=True, help_text="Of a hosted policy: the provider's model id", max_length=500
            ),
        ),
        migrations.AlterField(
            model_name="policy",
            name="base_model_hash",
            field=models.CharField(blank=True, max_length=100),
        ),
        migrations.AlterField(
            model_name="policy",
            name="feedback_count",
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AlterField(
            model_name="policy",
            name="kind",
            field=models.CharField(
                choices=[
                    ("adapter", "LoRA adapter"),
                    ("linear", "linear"),
                    ("hosted", "hosted model"),
                    ("recorded", "recorded answers"),
                ],
                default="adapter",
                max_length=16,
            ),
        ),
        migrations.AddConstraint(
            model_name="upstream",
            constraint=models.CheckConstraint(
                condition=models.Q(("dialect__in", ["openai", "responses", "anthropic"])),
                name="upstream_dialect_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="upstream",
            constraint=models.CheckConstraint(
                condition=models.Q(("timeout_s__gt", 0), ("connect_timeout_s__gt", 0)),
                name="upstream_timeouts_positive",
            ),
        ),
        migrations.AddConstraint(
            model_name="upstream",
            constraint=models.CheckConstraint(
                condition=models.Q(("key_env", ""), ("key_encrypted", ""), _connector="OR"),
                name="upstream_one_key",
            ),
        ),
        migrations.AddField(
            model_name="policy",
            name="upstream",
            field=models.ForeignKey(
                blank=True,
                help_text="Of a hosted policy: the endpoint that is asked",
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="policies",
                to="rl.upstream",
            ),
        ),
        migrations.AddConstraint(
            model_name="policy",
            constraint=models.CheckConstraint(
                condition=models.Q(("kind__in", ["adapter", "linear", "hosted", "recorded"])),
                name="policy_kind_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="policy",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("upstream__isnull", False), models.Q(("kind", "hosted"), _negated=True), _connector="OR"
                ),
                name="policy_hosted_has_upstream",
            ),
        ),
        migrations.AddConstraint(
            model_name="policy",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("kind__in", ["hosted", "recorded"]),
                    models.Q(("adapter_path", ""), _negated=True),
                    _connector="OR",
                ),
                name="policy_trained_has_files",
            ),
        ),
        migrations.AddConstraint(
            model_name="policy",
            constraint=models.UniqueConstraint(
                condition=models.Q(("kind", "recorded")),
                fields=("agent", "recorded_as"),
                name="policy_recorded_once_per_name",
            ),
        ),
    ]
