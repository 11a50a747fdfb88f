"""The engine of one machine: a job's passes on threads, without Java. May be deleted (see `sluice.etl.engines`)."""
