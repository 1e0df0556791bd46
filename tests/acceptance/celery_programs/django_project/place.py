"""A script that does what a Django view does."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")

import django

django.setup()

from django.db import transaction
from orders.models import Order
from orders.tasks import count_invoiced, invoice, process

with transaction.atomic():
    order = Order.objects.create(customer="ann", total="9.90")
    transaction.on_commit(lambda: print("invoiced:", invoice.delay(order.pk).get(timeout=30)))
print("chain:", process(order).get(timeout=30))
print("count:", count_invoiced.delay().get(timeout=30))
print("missing:", type(invoice.delay(999).get(timeout=30, propagate=False)).__name__)
