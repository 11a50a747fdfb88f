"""The demos: `python -m dlrm.demo` and `python -m dlrm.demo.schema_change`."""
