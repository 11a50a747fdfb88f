"""Opens a BatchLoader from keywords that may come from a dictionary: `open_loader`, `load_epoch`, `first_batch`. And
reads the rows that one has quarantined: `quarantined_rows`."""

import json
from collections import deque
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


def load_epoch(source, batch_size=80, **options):
    """Loads one epoch, and returns its order's hash and the figures of its store."""
    with open_loader(source, batch_size=batch_size, **options) as loader:
        deque(loader, maxlen=0)
        return loader.order_hash, loader.store


def first_batch(source, batch_size, **options):
    """Returns the first rows, as they lie."""
    options |= {"batch_size": batch_size, "shuffle": False, "streams": 1}
    with open_loader(source, **options) as loader:
        return next(iter(loader))


def quarantined_rows(path):
    """Returns the lines of a list of quarantined rows."""
    return [json.loads(line) for line in path.read_text().splitlines()]
