"""What a path or a URI means, in the one place that decides it."""

import builtins
import json
import os

import pytest

from sluice import FeatureTable
from sluice.common.program import run
from sluice.common.stores import _s3
from tests.product import Place, StoreError, TableError, say
from tests.raises import MISTAKES, raises


@pytest.mark.parametrize(
    ("uri", "scheme", "path", "query"),
    [
        ("data/a b.parquet", "", "data/a b.parquet", ""),
        ("data/what?x=1", "", "data/what?x=1", ""),
        ("file:///data/a%20b", "", "/data/a b", ""),
        ("s3://bucket/t", "s3", "bucket/t", ""),
        ("s3a://bucket/t?region=eu-west-1", "s3", "bucket/t", "region=eu-west-1"),
        ("s3n://bucket/t/part?.csv", "s3", "bucket/t/part?.csv", ""),
        ("GS://bucket/t?a=b&c=d", "gs", "bucket/t", "a=b&c=d"),
        ("latency:///data?latency_ms=5", "latency", "/data", "latency_ms=5"),
        ("latency://s3://bucket/t?latency_ms=5", "latency", "s3://bucket/t", "latency_ms=5"),
    ],
)
def test_a_name_has_a_scheme_a_path_and_options(uri, scheme, path, query):
    place = Place.of(uri)
    assert (place.scheme, place.path, place.query) == (scheme, path, query)


def test_a_jobs_input_keeps_the_signs_of_its_names():
    assert Place.of("file:///data/a%20b", decode=False).path == "/data/a%20b"


@pytest.mark.parametrize("uri", ["file://data", "s3://"])
def test_a_malformed_name_is_refused(uri):
    with raises(StoreError, uri):
        Place.of(uri)


def test_s3_takes_options_from_the_name_then_from_the_environment(monkeypatch):
    import pyarrow.fs as pafs

    _s3.cache_clear()
    asked = []

    class Store:
        def __init__(self, *, retry_strategy, **settings):
            asked.append(settings)

    monkeypatch.setattr(pafs, "S3FileSystem", Store)
    monkeypatch.setattr(pafs, "resolve_s3_region", lambda bucket: f"region of {bucket}")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert Place.of("s3://bucket/key").files()[1] == "bucket/key"
    assert asked.pop() == {"region": "region of bucket"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9/")
    Place.of("s3://bucket/key").files()
    assert asked.pop() == {"scheme": "http", "endpoint_override": "127.0.0.1:9"}
    Place.of("s3://bucket/key?endpoint_override=127.0.0.1:8&anonymous=true").files()
    options = asked.pop()
    assert (options["endpoint_override"], options["anonymous"]) == ("127.0.0.1:8", True)
    assert Place.of("s3://me:se%2Fcret@bucket/key?region=r").files()[1] == "bucket/key"
    options = asked.pop()
    assert (options["access_key"], options["secret_key"]) == ("me", "se/cret")
    with raises(StoreError, "s3://bucket", "'regoin'", "'region'"):
        Place.of("s3://bucket/key?regoin=x").files()
    _s3.cache_clear()


def test_delta_and_iceberg_get_the_same_endpoint():
    place = Place.of("s3://b/t?endpoint_override=127.0.0.1:9&scheme=http&region=r")
    assert place.delta["storage_options"] == {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "r",
    }
    assert place.iceberg == {"s3.endpoint": "http://127.0.0.1:9", "s3.region": "r"}
    here = Place.of("latency://60ms/data/t/").delta
    assert here == {"table_uri": os.path.abspath("/data/t"), "storage_options": None}


def test_a_store_that_nothing_opens_is_named_with_what_to_install(monkeypatch):
    with raises(StoreError, "nowhere://x/y", "'nowhere'"):
        Place.of("nowhere://x/y").files()
    real = builtins.__import__

    def without_fsspec(name, *args):
        if name == "fsspec":
            raise ModuleNotFoundError(name, name=name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_fsspec)
    with raises(StoreError, "memory://x", "fsspec", "pip install"):
        Place.of("memory://x").files()


@pytest.mark.parametrize(
    ("uri", "shown"),
    MISTAKES["uri_with_keys"],
)
def test_messages_show_no_keys_of_a_uri(uri, shown, capsys):
    """Errors, the lines of programs, their last line, and the traceback of an unexpected error."""
    assert str(StoreError(f"{uri}: wrong")).startswith(shown)
    say(f"{uri}: wrong")

    def fail(argv):
        raise OSError(*argv)

    for main in (lambda argv: {"data": argv[0]}, fail):
        with pytest.raises(SystemExit):
            run(main, argv=[uri])
    out, err = capsys.readouterr()
    assert f"\nOSError: {shown}" in err
    assert json.loads(out)["data"].startswith(shown)
    assert err.startswith(shown)
    assert "SECRET" not in out + err


def test_a_store_that_is_named_with_keys_is_refused_without_them():
    with raises(TableError, "s3://***@bucket/t") as refused:
        FeatureTable.open("s3://KEY:SECRET@bucket/t?regoin=eu")
    assert "SECRET" not in str(refused.value)
