"""Spark jobs that write feature tables, and the contract (spec, operators, table) that others read them by."""
