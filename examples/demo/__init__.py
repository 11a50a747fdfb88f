"""The demos: `python -m examples.demo` and `python -m examples.demo.schema_change`."""
