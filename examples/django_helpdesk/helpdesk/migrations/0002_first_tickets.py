"""Three tickets to begin with."""

from django.db import migrations

TICKETS = [
    ("Ada", "You charged my card twice for the blue lamp. Can I have one of them back?"),
    ("Bob", "Where is my parcel? Tracking stopped three days ago."),
    ("Eve", "The desk does not fit my room. How do I send it back?"),
]


def tickets_add(apps, editor):
    ticket = apps.get_model("helpdesk", "Ticket")
    ticket.objects.bulk_create([ticket(customer=name, question=text) for name, text in TICKETS])


class Migration(migrations.Migration):
    dependencies = [("helpdesk", "0001_initial")]
    operations = [migrations.RunPython(tickets_add, migrations.RunPython.noop)]
