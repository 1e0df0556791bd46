from django.db import models


class Order(models.Model):
    customer = models.CharField(max_length=50)
    total = models.DecimalField(max_digits=8, decimal_places=2)
    is_invoiced = models.BooleanField(default=False)
