from orchestrator.compat.celery import chain, shared_task
from orchestrator.compat.celery.utils.log import get_task_logger
from orders.models import Order

logger = get_task_logger(__name__)


@shared_task(bind=True, autoretry_for=(Order.DoesNotExist,), retry_kwargs={"max_retries": 3, "countdown": 0.2})
def invoice(self, order_id):
    order = Order.objects.get(pk=order_id)
    order.is_invoiced = True
    order.save(update_fields=["is_invoiced"])
    logger.info("invoiced %s", order.customer)
    return str(order.total)


@shared_task
def thank(total, customer):
    return f"thank you for {total}, {customer}"


@shared_task
def count_invoiced():
    return Order.objects.filter(is_invoiced=True).count()


def process(order):
    return chain(invoice.s(order.pk), thank.s(order.customer)).delay()
