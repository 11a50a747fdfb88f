"""Opens a BatchLoader from keywords that may come from a dictionary: `open_loader`."""

from dataclasses import fields

from sluice import Order, Reading
from tests.product import BatchLoader


def open_loader(source, *, epochs=1, **options):
    """Makes a loader that reads ahead `epochs`. The fields of `Order` and `Reading` are keywords here, along with those
    of the loader."""
    order, reading = (
        kind(**{f.name: options.pop(f.name) for f in fields(kind) if f.name in options})
        for kind in (Order, Reading)
    )
    return BatchLoader(source, read_ahead_epochs=epochs, order=order, reading=reading, **options)
